// A kernel module that does nothing: it carries the version and the licence of an NVIDIA driver release, so that DKMS
// has something real to build and modinfo something real to read. The Makefile passes both.
#include <linux/module.h>

static int __init nvidia_init(void) { return 0; }
static void __exit nvidia_exit(void) {}

module_init(nvidia_init);
module_exit(nvidia_exit);
MODULE_DESCRIPTION("Bedplate test stand-in, not NVIDIA's driver");
MODULE_LICENSE(FIXTURE_LICENSE);
MODULE_VERSION(FIXTURE_VERSION);
