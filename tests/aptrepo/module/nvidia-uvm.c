// The second module of a driver, for its parameter. See nvidia.c.
#include <linux/module.h>
#include <linux/moduleparam.h>

static bool uvm_disable_hmm;
module_param(uvm_disable_hmm, bool, 0444);
MODULE_PARM_DESC(uvm_disable_hmm, "As NVIDIA's: true turns heterogeneous memory management off");

static int __init uvm_init(void) { return 0; }
static void __exit uvm_exit(void) {}

module_init(uvm_init);
module_exit(uvm_exit);
MODULE_DESCRIPTION("Bedplate test stand-in, not NVIDIA's driver");
MODULE_LICENSE(FIXTURE_LICENSE);
MODULE_VERSION(FIXTURE_VERSION);
