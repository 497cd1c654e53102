// cuda_src/ptx/wmma_sm80.cuh on the CPU, where every format has the same definition.
#pragma once

#include "ptx/wmma.cuh"
