// What the operating system and the launcher know about this process.
#pragma once

#include "trace/event.h"

namespace assay {

// Host name, pid, start time, working folder, argv of /proc/self/cmdline; rank and world size from the variables of
// torchrun, Open MPI, MPICH/Intel MPI, MVAPICH and Slurm, in this order, else 0 and 1.
// Reads files and the environment; not to be called while another thread changes the environment. May throw
// std::bad_alloc.
ProcessInfo DescribeThisProcess();

}  // namespace assay
