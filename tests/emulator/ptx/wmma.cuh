// cuda_src/ptx/wmma.cuh on the CPU. Lanes hold fragments in an order that no GPU has, and that differs between A, B and
// C: kernels must not know it. Products are exact, with one rounding to float at the end.
#pragma once

#include "common/config.cuh"
#include "ptx/convert.cuh"

namespace cuflash {

// Which element, counted along the rows of a fragment of 32 * kPerLane elements, is number i of a lane.
template <int kPerLane>
inline int wmma_place(int lane, int i, int stride) {
    return (lane * kPerLane + i) * stride % (32 * kPerLane);
}
constexpr int kWmmaOrderA = 91, kWmmaOrderB = 53, kWmmaOrderC = 37;  // odd, so that every element has one place

struct WmmaC {
    float x[8];
};

struct WmmaAddress {
    unsigned long long address;
    int pitch_bytes;
};

// All lanes must name the same memory, on the boundaries that the instructions want.
inline void wmma_meet(const char* name, const void* address, int pitch_bytes) {
    const WmmaAddress mine = {reinterpret_cast<unsigned long long>(address), pitch_bytes};
    if (mine.address % 32 != 0 || mine.pitch_bytes % 16 != 0) cpu_cuda_fail("wmma: address or pitch on no boundary");
    WmmaAddress first;
    cpu_cuda_collective(name, &mine, &first, false, [](const void* const* inputs, void* const* outputs) {
        for (int lane = 0; lane < 32; ++lane)
            *static_cast<WmmaAddress*>(outputs[lane]) = *static_cast<const WmmaAddress*>(inputs[0]);
    });
    if (first.address != mine.address || first.pitch_bytes != mine.pitch_bytes)
        cpu_cuda_fail("wmma: lanes name different addresses or pitches");
}

inline void wmma_load_column(WmmaC& c, const float* shared) {
    wmma_meet("wmma.load.c", shared, 0);
    for (int i = 0; i < 8; ++i) c.x[i] = shared[wmma_place<8>(cpu_cuda_lane(), i, kWmmaOrderC) / 16];
}

template <int kOffset>
inline void wmma_store(float* shared, const WmmaC& c, int pitch) {
    wmma_meet("wmma.store.d", shared + kOffset, pitch * 4);
    for (int i = 0; i < 8; ++i) {
        const int place = wmma_place<8>(cpu_cuda_lane(), i, kWmmaOrderC);
        shared[kOffset + place / 16 * pitch + place % 16] = c.x[i];
    }
}

inline void wmma_fence() {}

template <int dtype>
struct WmmaFormat {
    using Element = unsigned short;
    static constexpr int kDepth = 16;
    static float value(const unsigned int* x, int i) {
        const auto bits = static_cast<unsigned short>(x[i / 2] >> 16 * (i % 2));
        return dtype == CUFLASH_FLOAT16 ? float_from_half_bits(bits) : float_from_bfloat16_bits(bits);
    }
    static void set(unsigned int* x, int i, Element element) {
        x[i / 2] = i % 2 == 0 ? element : x[i / 2] | static_cast<unsigned int>(element) << 16;
    }
};
template <>
struct WmmaFormat<CUFLASH_FLOAT32> {
    using Element = float;
    static constexpr int kDepth = 8;
    // The hardware ignores the 13 bits that TF32 has not.
    static float value(const unsigned int* x, int i) { return __uint_as_float(x[i] & 0xffffe000u); }
    static void set(unsigned int* x, int i, Element element) { x[i] = __float_as_uint(element); }
};

struct WmmaInput {
    const unsigned int* a;
    const unsigned int* b;
    const float* c;
};

template <int dtype>
struct Wmma {
    using Format = WmmaFormat<dtype>;
    using Element = typename Format::Element;
    static constexpr int kDepth = Format::kDepth;
    static constexpr int kPerLane = kDepth / 2;
    struct A {
        unsigned int x[dtype == CUFLASH_FLOAT16 ? 8 : 4];
    };
    struct B : A {};
    struct BTransposed : A {};

    template <int kOffset>
    static void load(A& a, const Element* shared, int pitch) {
        wmma_meet("wmma.load.a", shared + kOffset, pitch * static_cast<int>(sizeof(Element)));
        for (int i = 0; i < kPerLane; ++i) {
            const int place = wmma_place<kPerLane>(cpu_cuda_lane(), i, kWmmaOrderA);
            Format::set(a.x, i, shared[kOffset + place / kDepth * pitch + place % kDepth]);
        }
    }
    template <int kOffset>
    static void load(B& b, const Element* shared, int pitch) {
        wmma_meet("wmma.load.b.row", shared + kOffset, pitch * static_cast<int>(sizeof(Element)));
        for (int i = 0; i < kPerLane; ++i) {
            const int place = wmma_place<kPerLane>(cpu_cuda_lane(), i, kWmmaOrderB);
            Format::set(b.x, i, shared[kOffset + place / 16 * pitch + place % 16]);
        }
    }
    template <int kOffset>
    static void load(BTransposed& b, const Element* shared, int pitch) {
        wmma_meet("wmma.load.b.col", shared + kOffset, pitch * static_cast<int>(sizeof(Element)));
        for (int i = 0; i < kPerLane; ++i) {
            const int place = wmma_place<kPerLane>(cpu_cuda_lane(), i, kWmmaOrderB);
            Format::set(b.x, i, shared[kOffset + place % 16 * pitch + place / 16]);
        }
    }
    static void multiply_add(WmmaC& c, const A& a, const B& b) { multiply_add(c, a.x, b.x); }
    static void multiply_add(WmmaC& c, const A& a, const BTransposed& b) { multiply_add(c, a.x, b.x); }

  private:
    static void multiply_add(WmmaC& c, const unsigned int* a, const unsigned int* b) {
        const WmmaC old = c;
        const WmmaInput input = {a, b, old.x};
        cpu_cuda_collective("wmma.mma", &input, &c, false, multiply_lanes);
    }
    static void multiply_lanes(const void* const* inputs, void* const* outputs) {
        float a[16][kDepth], b[kDepth][16];
        for (int lane = 0; lane < 32; ++lane) {
            const auto* input = static_cast<const WmmaInput*>(inputs[lane]);
            for (int i = 0; i < kPerLane; ++i) {
                (&a[0][0])[wmma_place<kPerLane>(lane, i, kWmmaOrderA)] = Format::value(input->a, i);
                (&b[0][0])[wmma_place<kPerLane>(lane, i, kWmmaOrderB)] = Format::value(input->b, i);
            }
        }
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 8; ++i) {
                const int place = wmma_place<8>(lane, i, kWmmaOrderC);
                double sum = static_cast<const WmmaInput*>(inputs[lane])->c[i];
                for (int k = 0; k < kDepth; ++k) sum += static_cast<double>(a[place / 16][k]) * b[k][place % 16];
                static_cast<WmmaC*>(outputs[lane])->x[i] = static_cast<float>(sum);
            }
        }
    }
};

}  // namespace cuflash
