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
    Accumulator small;            // scores up to this size are capped by the polynomial, below 0: none
    Accumulator odd[3];           // score (odd[0] + score^2 (odd[1] + score^2 odd[2])) is the capped one
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
        const double ratio = params.scale / params.softcap;
        unit.softcap_in_bits = static_cast<Accumulator>(2 * kLog2E * ratio);
        // tanh(x) up to |x| = limit <= 0.35, to 6e-7: its series, with the terms of degree 7 and 9 replaced by the
        // nearest polynomials of lower degree (Chebyshev). Weights of logits up to 8.6 stay in the normal range of
        // float16 relative to any of them.
        const double limit = min(0.35, 8.6 / params.softcap), square = limit * limit;
        const bool exact = unit.capped && ratio >= 1e-6 && ratio <= 1e6;
        unit.small = static_cast<Accumulator>(exact ? limit / ratio : -1);
        const double ninth = 62.0 / 2835 * square * square,
                     seventh = (-17.0 / 315 + 2.25 * 62 / 2835 * square) * square;
        const double odd[] = {1 + (0.109375 * seventh - 0.03515625 * ninth) * square * square,
                              -1.0 / 3 + (-0.875 * seventh + 0.46875 * ninth) * square,
                              2.0 / 15 + 1.75 * seventh - 1.6875 * ninth};
        double power = ratio;
        for (int i = 0; i < 3; ++i, power *= ratio * ratio) unit.odd[i] = static_cast<Accumulator>(odd[i] * power);
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
