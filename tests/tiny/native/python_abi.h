// The little of CPython's stable ABI (PEP 384) that an empty extension module needs, written out so that building the tiny
// wheels takes a compiler and no Python headers, which Debian ships apart. Layout: CPython, Include/moduleobject.h.
#pragma once
#include <cstddef>

extern "C" {
struct PyModuleDef {
    struct {
        ptrdiff_t refcount;
        void *type;
        void *(*init)(void);
        ptrdiff_t index;
        void *copy;
    } base;
    const char *name;
    const char *doc;
    ptrdiff_t size;
    void *methods, *slots, *traverse, *clear, *free;
};
void *PyModule_Create2(PyModuleDef *definition, int api_version);
}

#define EMPTY_MODULE(NAME)                                                                      \
    static PyModuleDef definition = {{1, 0, 0, 0, 0}, #NAME, 0, -1, 0, 0, 0, 0, 0};              \
    extern "C" __attribute__((visibility("default"))) void *PyInit_##NAME(void) {              \
        return PyModule_Create2(&definition, 3 /* PYTHON_ABI_VERSION */);                      \
    }
