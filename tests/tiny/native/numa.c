/* What the extension is linked against, so that building needs no libnuma-dev. */
int numa_available(void) { return -1; }
