/*
 * A fake libnvidia-ml.so.1: a stand-in for hardware, for test images only.
 *
 * It contains nothing of NVIDIA's library. It answers the NVML calls that nvidia-ml-py makes, for GPUs that do not
 * exist, so that a container without a device can play an 8-GPU node. Never install it on a machine that has GPUs.
 *
 * What it presents is read at nvmlInit from /etc/fakegpu.conf (or the file named by FAKEGPU_CONF). No file means
 * eight healthy "NVIDIA RTX PRO 6000 Blackwell Server Edition". README.md in this directory lists the keys. A file
 * with a mistake in it is reported on stderr, with its line, and makes nvmlInit return NVML_ERROR_UNKNOWN: a test
 * that asked for a fault it did not get must not pass.
 *
 * Structure layouts, buffer sizes and return codes: the public NVML API reference, as bound by nvidia-ml-py.
 */
#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define API __attribute__((visibility("default")))
#define MAX_GPUS 16
#define MAX_RULES 64
#define TEXT 96 /* NVML_DEVICE_NAME_V2_BUFFER_SIZE, the longest string NVML returns here */
#define MIB (1024ULL * 1024ULL)

typedef int nvmlReturn_t;
enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
};

struct gpu {
    char name[TEXT], vbios[TEXT], pci_bus_id[TEXT], pci_device_id[TEXT], pci_subsystem_id[TEXT], uuid[TEXT], serial[TEXT];
    int memory_mib, memory_used_mib, bar1_mib;
    int ecc, ecc_pending, persistence, temperature_c;
    int ecc_corrected, ecc_uncorrected, ecc_corrected_total, ecc_uncorrected_total;
    int utilization, process, throttle_reasons, recovery_action;
    int pcie_width, pcie_width_max, pcie_gen, pcie_gen_max, pcie_replays;
    int compute_major, compute_minor;
    int remapped_correctable, remapped_uncorrectable, remap_pending, remap_failed;
    int retired_single_bit, retired_double_bit, retired_pending; /* of a GPU without row remapping: see retired_pages */
    int retired_pages, row_remapper;                             /* whether it has the one and the other */
    int error; /* the code every call for this GPU returns: 15 is "fell off the bus" */
};
typedef struct gpu *nvmlDevice_t;

/* One "error.<function>" or "block.<function>" line. */
struct rule {
    char function[TEXT];
    int value;
};

static struct {
    int count, cuda_version;
    char driver_version[TEXT], nvml_version[TEXT], loaded_file[TEXT], library_file[TEXT];
    struct gpu gpus[MAX_GPUS];
    struct rule errors[MAX_RULES], blocks[MAX_RULES];
    size_t n_errors, n_blocks;
} node;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int references; /* nvmlInit calls not yet matched by nvmlShutdown */

/* ---- configuration -------------------------------------------------------------------------------------------- */

enum kind { NUMBER, STRING };
struct key {
    const char *name;
    enum kind kind;
    size_t offset;
};

#define GPU_KEY(field, kind) {#field, kind, offsetof(struct gpu, field)}
static const struct key gpu_keys[] = {
    GPU_KEY(name, STRING),           GPU_KEY(pci_bus_id, STRING),       GPU_KEY(pci_device_id, STRING),
    GPU_KEY(pci_subsystem_id, STRING), GPU_KEY(uuid, STRING),           GPU_KEY(serial, STRING),
    GPU_KEY(memory_mib, NUMBER),     GPU_KEY(memory_used_mib, NUMBER),  GPU_KEY(bar1_mib, NUMBER),
    GPU_KEY(ecc, NUMBER),            GPU_KEY(ecc_pending, NUMBER),      GPU_KEY(persistence, NUMBER),
    GPU_KEY(temperature_c, NUMBER),  GPU_KEY(pcie_width, NUMBER),       GPU_KEY(pcie_width_max, NUMBER),
    GPU_KEY(pcie_gen, NUMBER),       GPU_KEY(pcie_gen_max, NUMBER),     GPU_KEY(compute_major, NUMBER),
    GPU_KEY(compute_minor, NUMBER),  GPU_KEY(remapped_correctable, NUMBER), GPU_KEY(remapped_uncorrectable, NUMBER),
    GPU_KEY(remap_pending, NUMBER),  GPU_KEY(remap_failed, NUMBER),     GPU_KEY(error, NUMBER),
    GPU_KEY(vbios, STRING),          GPU_KEY(pcie_replays, NUMBER),     GPU_KEY(ecc_corrected, NUMBER),
    GPU_KEY(ecc_uncorrected, NUMBER), GPU_KEY(ecc_corrected_total, NUMBER), GPU_KEY(ecc_uncorrected_total, NUMBER),
    GPU_KEY(utilization, NUMBER),    GPU_KEY(process, NUMBER),          GPU_KEY(throttle_reasons, NUMBER),
    GPU_KEY(recovery_action, NUMBER), GPU_KEY(retired_pages, NUMBER),   GPU_KEY(row_remapper, NUMBER),
    GPU_KEY(retired_single_bit, NUMBER), GPU_KEY(retired_double_bit, NUMBER), GPU_KEY(retired_pending, NUMBER),
};
static const struct gpu healthy = {
    .name = "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    .pci_device_id = "10de:2bb5", .pci_subsystem_id = "10de:204e",
    .memory_mib = 97887, .bar1_mib = 131072,
    .ecc = 1, .ecc_pending = 1, .persistence = 1, .temperature_c = 34,
    .pcie_width = 16, .pcie_width_max = 16, .pcie_gen = 1, .pcie_gen_max = 5, /* an idle link trains down: gen 1 */
    .compute_major = 12, .compute_minor = 0,
    .vbios = "98.02.81.00.07", .throttle_reasons = 1 /* idle */, .row_remapper = 1,
};

/* Copy text into a buffer of TEXT bytes; 0 when it does not fit. */
static int copy_text(char *out, const char *text) {
    if (strlen(text) >= TEXT)
        return 0;
    strcpy(out, text);
    return 1;
}

static int parse_number(const char *text, int *out) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 0);
    if (errno || end == text || *end || value < 0 || value > 0x7fffffff)
        return 0;
    *out = (int)value;
    return 1;
}

/* "10de:2bb5" -> 0x2bb510de, the layout of nvmlPciInfo_t.pciDeviceId. */
static int parse_pci_pair(const char *text, unsigned *out) {
    unsigned vendor, device;
    int used = 0;
    if (sscanf(text, "%4x:%4x%n", &vendor, &device, &used) != 2 || text[used])
        return 0;
    *out = device << 16 | vendor;
    return 1;
}

static int parse_bus_id(const char *text, unsigned *domain, unsigned *bus, unsigned *device) {
    unsigned function;
    int used = 0;
    return sscanf(text, "%8x:%2x:%2x.%1x%n", domain, bus, device, &function, &used) == 4 && !text[used];
}

/* Set one field of one GPU; a sentence on error, NULL when done. */
static const char *set_gpu_key(struct gpu *gpu, const char *name, const char *value) {
    unsigned a, b, c;
    for (size_t i = 0; i < sizeof gpu_keys / sizeof *gpu_keys; i++) {
        if (strcmp(gpu_keys[i].name, name))
            continue;
        if (gpu_keys[i].kind == NUMBER)
            return parse_number(value, (int *)((char *)gpu + gpu_keys[i].offset)) ? NULL : "not a number";
        if (!strcmp(name, "pci_bus_id") && !parse_bus_id(value, &a, &b, &c))
            return "not a PCI address such as 0000:01:00.0";
        if ((!strcmp(name, "pci_device_id") || !strcmp(name, "pci_subsystem_id")) && !parse_pci_pair(value, &a))
            return "not a PCI id such as 10de:2bb5";
        return copy_text((char *)gpu + gpu_keys[i].offset, value) ? NULL : "too long";
    }
    return "unknown key";
}

/* nvmlDeviceGetName_v2 and nvmlDeviceGetName are the same function to a configuration file. */
static size_t base_length(const char *function) {
    size_t n = strlen(function);
    return n > 3 && function[n - 3] == '_' && function[n - 2] == 'v' && isdigit((unsigned char)function[n - 1]) ? n - 3 : n;
}

static const char *add_rule(struct rule *rules, size_t *n, const char *function, const char *value) {
    if (strncmp(function, "nvml", 4) || *n == MAX_RULES || !copy_text(rules[*n].function, function))
        return "not the name of an NVML function";
    rules[*n].function[base_length(function)] = '\0';
    return parse_number(value, &rules[(*n)++].value) ? NULL : "not a number";
}

static const char *set_key(char *name, const char *value) {
    if (!strcmp(name, "count"))
        return parse_number(value, &node.count) && node.count <= MAX_GPUS ? NULL : "not a number from 0 to 16";
    if (!strcmp(name, "cuda_version"))
        return parse_number(value, &node.cuda_version) ? NULL : "not a number";
    if (!strcmp(name, "driver_version"))
        return copy_text(node.driver_version, value) ? NULL : "too long";
    if (!strcmp(name, "nvml_version"))
        return copy_text(node.nvml_version, value) ? NULL : "too long";
    if (!strcmp(name, "loaded_file"))
        return copy_text(node.loaded_file, value) ? NULL : "too long";
    if (!strcmp(name, "library_file"))
        return copy_text(node.library_file, value) ? NULL : "too long";
    if (!strncmp(name, "error.", 6))
        return add_rule(node.errors, &node.n_errors, name + 6, value);
    if (!strncmp(name, "block.", 6))
        return add_rule(node.blocks, &node.n_blocks, name + 6, value);
    if (!strncmp(name, "gpu.", 4)) {
        int index;
        char *field = strchr(name + 4, '.');
        if (!field)
            return "not gpu.<index>.<key>";
        *field = '\0';
        int valid = parse_number(name + 4, &index) && index < MAX_GPUS;
        *field = '.';
        if (!valid)
            return "not gpu.<index>.<key> with an index from 0 to 15";
        return set_gpu_key(&node.gpus[index], field + 1, value);
    }
    for (int i = 0; i < MAX_GPUS; i++) {
        const char *problem = set_gpu_key(&node.gpus[i], name, value);
        if (problem)
            return problem;
    }
    return NULL;
}

static void set_defaults(void) {
    memset(&node, 0, sizeof node);
    node.count = 8;
    node.cuda_version = 13000;
    strcpy(node.loaded_file, "/run/fakegpu/loaded");
    strcpy(node.library_file, "/etc/fakegpu/library");
    for (int i = 0; i < MAX_GPUS; i++) {
        struct gpu *gpu = &node.gpus[i];
        *gpu = healthy;
        snprintf(gpu->pci_bus_id, TEXT, "00000000:%02X:00.0", 0x10 * i + 1);
        snprintf(gpu->uuid, TEXT, "GPU-fa4e0000-0000-4000-8000-%012x", i);
        snprintf(gpu->serial, TEXT, "FAKE%08d", i);
    }
}

static char *trim(char *text) {
    while (isspace((unsigned char)*text))
        text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1]))
        *--end = '\0';
    return text;
}

static nvmlReturn_t read_file(void) {
    const char *asked = getenv("FAKEGPU_CONF");
    const char *path = asked ? asked : "/etc/fakegpu.conf";
    char line[512];
    nvmlReturn_t result = NVML_SUCCESS;

    FILE *file = fopen(path, "re");
    if (!file && errno == ENOENT && !asked)
        return NVML_SUCCESS;
    if (!file) {
        fprintf(stderr, "fakegpu: %s: %s\n", path, strerror(errno));
        return NVML_ERROR_UNKNOWN;
    }
    for (int number = 1; fgets(line, sizeof line, file); number++) {
        char *name = trim(line), *value = strchr(name, '=');
        if (!*name || *name == '#')
            continue;
        const char *problem = "not key=value";
        if (value) {
            *value++ = '\0';
            name = trim(name);
            problem = set_key(name, trim(value));
        }
        if (problem) {
            fprintf(stderr, "fakegpu: %s:%d: %s: %s\n", path, number, name, problem);
            result = NVML_ERROR_UNKNOWN;
        }
    }
    fclose(file);
    return result;
}

/* The first line of a file, trimmed; 0 when there is no such file. */
static int read_line(const char *path, char *out) {
    char line[512];
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    if (!fgets(line, sizeof line, file))
        *line = '\0';
    fclose(file);
    return copy_text(out, trim(line));
}

/*
 * A node with packages that play a driver has two versions, as a real one has: that of the library on disk and that of
 * the module which is loaded until the next boot. They come from two files (README.md), and as in the real library no
 * module means code 9, and another module code 18. Without the files, or with driver_version, there is one version.
 */
static nvmlReturn_t find_version(void) {
    char loaded[TEXT] = "", library[TEXT] = "";
    if (*node.driver_version)
        return NVML_SUCCESS;
    int has_loaded = read_line(node.loaded_file, loaded), has_library = read_line(node.library_file, library);
    if (has_library && (!has_loaded || !*loaded))
        return NVML_ERROR_DRIVER_NOT_LOADED;
    if (has_library && strcmp(loaded, library))
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    strcpy(node.driver_version, has_loaded && *loaded ? loaded : "580.82.07");
    return NVML_SUCCESS;
}

static nvmlReturn_t load(void) {
    set_defaults();
    nvmlReturn_t result = read_file();
    if (!result)
        result = find_version();
    if (!*node.nvml_version && strlen(node.driver_version) < TEXT - 4) {
        strcpy(node.nvml_version, "13."); /* NVML names itself <CUDA major>.<driver version> */
        strcat(node.nvml_version, node.driver_version);
    }
    return result;
}

/* ---- every call ----------------------------------------------------------------------------------------------- */

static const struct rule *find_rule(const struct rule *rules, size_t n, const char *function) {
    size_t length = base_length(function);
    for (size_t i = 0; i < n; i++)
        if (strlen(rules[i].function) == length && !strncmp(rules[i].function, function, length))
            return &rules[i];
    return NULL;
}

/* Sleep and fail as the configuration asks for this function. */
static nvmlReturn_t injected(const char *function) {
    const struct rule *block = find_rule(node.blocks, node.n_blocks, function);
    const struct rule *error = find_rule(node.errors, node.n_errors, function);
    if (block) {
        struct timespec left = {.tv_sec = block->value};
        while (nanosleep(&left, &left) && errno == EINTR)
            ;
    }
    return error ? error->value : NVML_SUCCESS;
}

static nvmlReturn_t enter(const char *function) {
    return references ? injected(function) : NVML_ERROR_UNINITIALIZED;
}

static nvmlReturn_t enter_gpu(const char *function, const struct gpu *gpu) {
    if (references && (gpu < node.gpus || gpu >= node.gpus + node.count))
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = enter(function);
    return result ? result : gpu->error;
}

static nvmlReturn_t put_text(char *out, unsigned length, const char *text) {
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

#define ENTER()                                \
    do {                                       \
        nvmlReturn_t entered = enter(__func__); \
        if (entered)                           \
            return entered;                    \
    } while (0)
#define ENTER_GPU(gpu)                                  \
    do {                                                \
        nvmlReturn_t entered = enter_gpu(__func__, gpu); \
        if (entered)                                    \
            return entered;                             \
    } while (0)

/* ---- library and node ----------------------------------------------------------------------------------------- */

static nvmlReturn_t init(void) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = references ? NVML_SUCCESS : load();
    if (!result)
        result = injected("nvmlInit");
    if (!result)
        references++;
    pthread_mutex_unlock(&lock);
    return result;
}

/*
 * The unversioned nvmlInit of the real library is left out on purpose. torch counts devices through it; without it
 * torch asks CUDA, which truthfully says there is none, so no code path takes this fake for something to compute on.
 */
API nvmlReturn_t nvmlInit_v2(void) { return init(); }
API nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return init();
}

API nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = enter(__func__);
    if (!result)
        references--;
    pthread_mutex_unlock(&lock);
    return result;
}

API const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
    case 0: return "Success";
    case 1: return "Uninitialized";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 8: return "Insufficient External Power";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 11: return "Interrupt Request Issue";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case 14: return "Corrupted infoROM";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 17: return "GPU access blocked by the operating system";
    case 18: return "Driver/library version mismatch";
    case 19: return "In use by another client";
    case 20: return "Insufficient Memory";
    case 23: return "Insufficient Resources";
    case 27: return "System is not in ready state";
    case 28: return "Device not found";
    case 25: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER();
    return put_text(version, length, node.driver_version);
}

API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    ENTER();
    return put_text(version, length, node.nvml_version);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER();
    *version = node.cuda_version;
    return NVML_SUCCESS;
}
API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER();
    *count = (unsigned)node.count;
    return NVML_SUCCESS;
}

/* ---- handles -------------------------------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    ENTER();
    if (index >= (unsigned)node.count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &node.gpus[index];
    return (*device)->error;
}

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    ENTER();
    for (int i = 0; i < node.count; i++)
        if (!strcmp(node.gpus[i].uuid, uuid))
            return nvmlDeviceGetHandleByIndex_v2((unsigned)i, device);
    return NVML_ERROR_NOT_FOUND;
}

API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    unsigned want[3], have[3];
    ENTER();
    if (!parse_bus_id(bus_id, &want[0], &want[1], &want[2]))
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < node.count; i++)
        if (parse_bus_id(node.gpus[i].pci_bus_id, &have[0], &have[1], &have[2]) && !memcmp(want, have, sizeof want))
            return nvmlDeviceGetHandleByIndex_v2((unsigned)i, device);
    return NVML_ERROR_NOT_FOUND;
}

API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t gpu, unsigned *index) {
    ENTER_GPU(gpu);
    *index = (unsigned)(gpu - node.gpus);
    return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t gpu, unsigned *minor) {
    ENTER_GPU(gpu);
    *minor = (unsigned)(gpu - node.gpus);
    return NVML_SUCCESS;
}

/* ---- one GPU -------------------------------------------------------------------------------------------------- */

#define TEXT_QUERY(function, field)                                                   \
    API nvmlReturn_t function(nvmlDevice_t gpu, char *out, unsigned length) {         \
        ENTER_GPU(gpu);                                                               \
        return put_text(out, length, gpu->field);                                     \
    }
#define UINT_QUERY(function, field)                                  \
    API nvmlReturn_t function(nvmlDevice_t gpu, unsigned *out) {     \
        ENTER_GPU(gpu);                                              \
        *out = (unsigned)gpu->field;                                 \
        return NVML_SUCCESS;                                         \
    }

TEXT_QUERY(nvmlDeviceGetName, name)
TEXT_QUERY(nvmlDeviceGetUUID, uuid)
TEXT_QUERY(nvmlDeviceGetSerial, serial)
UINT_QUERY(nvmlDeviceGetCurrPcieLinkWidth, pcie_width)
UINT_QUERY(nvmlDeviceGetMaxPcieLinkWidth, pcie_width_max)
UINT_QUERY(nvmlDeviceGetCurrPcieLinkGeneration, pcie_gen)
UINT_QUERY(nvmlDeviceGetMaxPcieLinkGeneration, pcie_gen_max)
UINT_QUERY(nvmlDeviceGetPersistenceMode, persistence)
UINT_QUERY(nvmlDeviceGetPcieReplayCounter, pcie_replays)
TEXT_QUERY(nvmlDeviceGetVbiosVersion, vbios)

/* nvmlPciInfo_t */
struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t gpu, struct pci_info *pci) {
    ENTER_GPU(gpu);
    memset(pci, 0, sizeof *pci);
    if (!parse_bus_id(gpu->pci_bus_id, &pci->domain, &pci->bus, &pci->device) ||
        !parse_pci_pair(gpu->pci_device_id, &pci->pci_device_id) ||
        !parse_pci_pair(gpu->pci_subsystem_id, &pci->pci_subsystem_id))
        return NVML_ERROR_UNKNOWN;
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    return NVML_SUCCESS;
}

/* nvmlMemory_t, and nvmlBAR1Memory_t with the same three numbers in the same order */
struct memory {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
#define NVML_MEMORY_V2 0x02000028u /* version 2, sizeof(nvmlMemory_v2_t) = 40 */

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t gpu, struct memory *memory) {
    ENTER_GPU(gpu);
    memory->total = (unsigned long long)gpu->memory_mib * MIB;
    memory->used = (unsigned long long)gpu->memory_used_mib * MIB;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t gpu, struct memory_v2 *memory) {
    ENTER_GPU(gpu);
    if (memory->version != NVML_MEMORY_V2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->total = (unsigned long long)gpu->memory_mib * MIB;
    memory->reserved = 0;
    memory->used = (unsigned long long)gpu->memory_used_mib * MIB;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t gpu, struct memory *bar1) {
    ENTER_GPU(gpu);
    bar1->total = bar1->free = (unsigned long long)gpu->bar1_mib * MIB;
    bar1->used = 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t gpu, int *current, int *pending) {
    ENTER_GPU(gpu);
    *current = gpu->ecc;
    *pending = gpu->ecc_pending;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t gpu, unsigned *correctable, unsigned *uncorrectable,
                                           unsigned *pending, unsigned *failed) {
    ENTER_GPU(gpu);
    if (!gpu->row_remapper)
        return NVML_ERROR_NOT_SUPPORTED;
    *correctable = (unsigned)gpu->remapped_correctable;
    *uncorrectable = (unsigned)gpu->remapped_uncorrectable;
    *pending = (unsigned)gpu->remap_pending;
    *failed = (unsigned)gpu->remap_failed;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t gpu, int *major, int *minor) {
    ENTER_GPU(gpu);
    *major = gpu->compute_major;
    *minor = gpu->compute_minor;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t gpu, int sensor, unsigned *celsius) {
    ENTER_GPU(gpu);
    if (sensor) /* NVML_TEMPERATURE_GPU is the only sensor */
        return NVML_ERROR_NOT_SUPPORTED;
    *celsius = (unsigned)gpu->temperature_c;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t gpu, int error_type, int counter_type,
                                             unsigned long long *count) {
    ENTER_GPU(gpu);
    if (!gpu->ecc)
        return NVML_ERROR_NOT_SUPPORTED;
    if (error_type == 0) /* NVML_MEMORY_ERROR_TYPE_CORRECTED; counter type 0 is NVML_VOLATILE_ECC */
        *count = (unsigned long long)(counter_type ? gpu->ecc_corrected_total : gpu->ecc_corrected);
    else
        *count = (unsigned long long)(counter_type ? gpu->ecc_uncorrected_total : gpu->ecc_uncorrected);
    return NVML_SUCCESS;
}

/* Retired pages are of GPUs before Ampere: a GPU has them or a row remapper. Their addresses say nothing here. */
API nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t gpu, int cause, unsigned *count, unsigned long long *addresses) {
    ENTER_GPU(gpu);
    if (!gpu->retired_pages)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned room = *count, have = (unsigned)(cause ? gpu->retired_double_bit : gpu->retired_single_bit);
    *count = have;
    if (!addresses || room < have)
        return have ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
    for (unsigned i = 0; i < have; i++)
        addresses[i] = 0x1000ULL * (i + 1);
    return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t gpu, int *pending) {
    ENTER_GPU(gpu);
    if (!gpu->retired_pages)
        return NVML_ERROR_NOT_SUPPORTED;
    *pending = gpu->retired_pending;
    return NVML_SUCCESS;
}

/* nvmlUtilization_t */
struct utilization {
    unsigned gpu, memory;
};
API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t gpu, struct utilization *rates) {
    ENTER_GPU(gpu);
    rates->gpu = (unsigned)gpu->utilization;
    rates->memory = 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t gpu, unsigned long long *reasons) {
    ENTER_GPU(gpu);
    *reasons = (unsigned long long)gpu->throttle_reasons;
    return NVML_SUCCESS;
}

/* nvmlFieldValue_t; of all fields only the recovery action is known here */
struct field_value {
    unsigned field_id, scope_id;
    long long timestamp, latency_us;
    int value_type;
    nvmlReturn_t result;
    union {
        double d;
        unsigned u;
        unsigned long long ull;
    } value;
};
#define NVML_FI_DEV_GET_GPU_RECOVERY_ACTION 230
API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t gpu, int count, struct field_value *values) {
    ENTER_GPU(gpu);
    for (int i = 0; i < count; i++) {
        int known = values[i].field_id == NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
        values[i].result = known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        values[i].value_type = 1; /* NVML_VALUE_TYPE_UNSIGNED_INT */
        values[i].value.ull = 0;
        values[i].value.u = known ? (unsigned)gpu->recovery_action : 0;
    }
    return NVML_SUCCESS;
}

/* nvmlProcessInfo_t */
struct process_info {
    unsigned pid;
    unsigned long long used_memory;
    unsigned gpu_instance, compute_instance;
};
/* Nothing computes on a GPU that does not exist: the list is empty, but for the one process that was asked for. */
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t gpu, unsigned *count, struct process_info *out) {
    ENTER_GPU(gpu);
    unsigned room = *count, have = gpu->process ? 1 : 0;
    *count = have;
    if (room < have)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (have)
        *out = (struct process_info){.pid = (unsigned)gpu->process, .gpu_instance = ~0U, .compute_instance = ~0U};
    return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t gpu, unsigned *count, struct process_info *out) {
    (void)out;
    ENTER_GPU(gpu);
    *count = 0;
    return NVML_SUCCESS;
}
