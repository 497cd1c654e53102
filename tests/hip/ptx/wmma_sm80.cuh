// cuda_src/ptx/wmma_sm80.cuh for AMD GPUs: bfloat16 is defined beside float16.
#pragma once

#include "ptx/wmma.cuh"
