// The unit of logits for kernels whose exponential takes a factor anyway.
#pragma once

#include "common/score.cuh"
#include "ptx/exp2.cuh"

namespace cuflash {

// Logits are left in a unit that saves a multiplication where one will do, as the exponential multiplies all the same.
struct LogitUnit {
    bool scaled;                  // scores are multiplied by the scale before anything else
    bool capped;                  // softcap is small enough for its fast form
    Accumulator factor;           // of natural logits
    Accumulator multiplier;       // factor * log2(e)
    Accumulator inverse;          // 1 / factor
    Accumulator softcap_in_bits;  // 2 log2(e) scale / softcap
    ScoreScale scale;
};

__device__ __forceinline__ LogitUnit logit_unit(const AttentionParams& params) {
    constexpr double kLog2E = 1.4426950408889634;
    LogitUnit unit = {};
    unit.factor = 1;
    unit.multiplier = static_cast<Accumulator>(kLog2E);
    unit.scale = score_scale(params);
    if constexpr (kHasSoftcap) {
        unit.capped = params.softcap >= 1e-20 && params.softcap <= 256;
        if (unit.capped && kBiasDtype == 0 && !kHasAlibi) {
            unit.factor = static_cast<Accumulator>(params.softcap);
            unit.multiplier = static_cast<Accumulator>(params.softcap * kLog2E);
        }
        unit.softcap_in_bits = static_cast<Accumulator>(2 * kLog2E * params.scale / params.softcap);
    } else {
        // A multiplier near the end of the range might count as 0, and 0 x -inf is no hidden score.
        const Accumulator multiplier = static_cast<Accumulator>(params.scale * kLog2E);
        unit.scaled = kBiasDtype != 0 || !(multiplier >= Accumulator(1e-30) && multiplier <= Accumulator(1e30));
        if (!unit.scaled) {
            unit.factor = static_cast<Accumulator>(params.scale);
            unit.multiplier = multiplier;
        }
    }
    unit.inverse = 1 / unit.factor;
    return unit;
}

__device__ __forceinline__ Accumulator unit_score(const LogitUnit& unit, Accumulator score) {
    if constexpr (kHasSoftcap) {
        if (!unit.capped) return scaled_score(unit.scale, score) * unit.inverse;
        // tanh(x) = 1 - 2 / (exp(2 x) + 1), to 2e-7 of 1
        const float power = exp2_approximate(score * unit.softcap_in_bits);
        const float capped = multiply_add(-2.0f, reciprocal_approximate(power + 1), 1.0f);
        return kBiasDtype == 0 && !kHasAlibi ? capped : capped * unit.scale.softcap;
    }
    return unit.scaled ? score * unit.scale.scale : score;
}

}  // namespace cuflash
