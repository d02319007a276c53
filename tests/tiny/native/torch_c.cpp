// Stand-in for torch/_C: an empty module whose DT_NEEDED brings torch's libraries into the process.
#include "python_abi.h"

EMPTY_MODULE(_C)
