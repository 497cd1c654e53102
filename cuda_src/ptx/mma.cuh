// Products of small matrices on tensor cores, D += A B with float accumulators (sm_80 and newer). Called by all 32
// lanes. In a 16x8 result lane l holds columns 2 (l % 4) and + 1 of row l / 4 (d[0], d[1]) and of row l / 4 + 8.
#pragma once

namespace cuflash {

// A 16x16 and B 16x8 of float16 or bfloat16, two elements to a register. A: rows l / 4 and + 8 (a[0], a[1]), columns
// 2 (l % 4) and + 1; a[2] and a[3] are 8 columns on. B: column l / 4, rows 2 (l % 4) and + 1; b[1] is 8 rows on.
template <bool kBfloat16>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    if constexpr (kBfloat16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

}  // namespace cuflash
