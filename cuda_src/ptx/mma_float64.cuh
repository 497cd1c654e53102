// Products of small matrices on tensor cores in double precision, D += A B (compute capability 8.0, 9.0 and 10.0).
#pragma once

namespace cuflash {

// A 16x16, B 16x8. Lane l holds row l / 4 of A (even a) and row l / 4 + 8 (odd ones), columns l % 4 + 4 (i / 2), column
// l / 4 of B, rows l % 4 + 4 i, and of D columns 2 (l % 4) and + 1 of row l / 4 (d[0], d[1]) and of row l / 4 + 8.
// Called by all 32 lanes.
__device__ __forceinline__ void mma_m16n8k16(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
#if __CUDA_ARCH__ == 900
    asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
          "d"(b[2]), "d"(b[3]));
#else
#pragma unroll
    for (int i = 0; i < 8; ++i)
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(d[i % 2 * 2]), "+d"(d[i % 2 * 2 + 1])
            : "d"(a[i]), "d"(b[i / 2]));
#endif
}

}  // namespace cuflash
