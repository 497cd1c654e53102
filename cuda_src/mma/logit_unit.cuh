// The unit of logits for kernels whose exponential takes a factor anyway.
#pragma once

#include "common/score.cuh"
#include "ptx/exp2.cuh"

namespace cuflash {

constexpr bool kUsualSoftcap = kCapDegree > 1;  // tanh by one exponential is exact enough
// Features alone, which have a short form, see mma/logits.cuh.
constexpr bool kPolynomialLogits = kUsualSoftcap && !kHasRowTerms;
constexpr bool kCapsOneByOne = kHasSoftcap && !kUsualSoftcap && !kHasRowTerms;
// Slopes alone are part of what products are added to, but where other instructions must not touch that.
constexpr bool kShiftedLogits = kOnlySlopes && !kWarpgroups;

// Logits are left in a unit that saves a multiplication where one will do, as the exponential multiplies all the same.
struct LogitUnit {
    bool scaled;                  // scores are multiplied by the scale before anything else
    Accumulator zero;             // which only the running kernel knows, see begin_scores
    Accumulator factor;           // of natural logits
    Accumulator multiplier;       // factor * log2(e)
    Accumulator inverse;          // 1 / factor
    Accumulator softcap_in_bits;  // 2 log2(e) scale / softcap
    Accumulator small;            // scores up to this size are capped by the polynomial, below 0: none
    Accumulator odd[3];  // score (odd[0] + score^2 (odd[1] + score^2 odd[2])) is the capped one; odd[2] may be 0
    ScoreScale scale;
};

__device__ __forceinline__ LogitUnit logit_unit(const AttentionParams& params) {
    constexpr double kLog2E = 1.4426950408889634;
    LogitUnit unit = {};
    unit.factor = 1;
    unit.multiplier = static_cast<Accumulator>(kLog2E);
    unit.scale = score_scale(params);
    if constexpr (kUsualSoftcap) {
        if (!kAddsTerms) {
            unit.factor = static_cast<Accumulator>(params.softcap);
            unit.multiplier = static_cast<Accumulator>(params.softcap * kLog2E);
        }
        const double ratio = params.scale_by_softcap;
        // tanh(x) up to |x| = limit: its series, with the terms of higher degree replaced by the nearest polynomials of
        // lower degree (Chebyshev). Weights of logits up to 8.6 stay in the normal range of float16 relative to any of
        // them. Degree 3 errs by limit^5 / 120, degree 5 by limit^7 / 1000 up to 0.5: some 2^-15 of a logit.
        constexpr float kLargestError = 1.0f / (1 << 15);
        const float softcap = static_cast<float>(params.softcap);
        constexpr float kPower = kCapDegree + 2, kFactor = kCapDegree == 3 ? 120 : 1000;
        const float widest = exponential(logarithm(kFactor * kLargestError / softcap) / kPower);
        const double limit = minimum(minimum(widest, 0.5f), 8.6f / softcap), square = limit * limit;
        // The last coefficient must not vanish: it is what makes hidden scores low.
        const double fifth_power = ratio * ratio * ratio * ratio * ratio;
        // right either way: the polynomial is the shorter way
        const bool exact = ratio >= 1e-6 && ratio <= 1e6 && params.softcap * fifth_power >= 1e-30;
        // right either way: the polynomial is the shorter way
        unit.small = static_cast<Accumulator>(exact ? limit / ratio : -1);
        const double ninth = 62.0 / 2835 * square * square,
                     seventh = (-17.0 / 315 + 2.25 * 62 / 2835 * square) * square;
        double odd[] = {1 + (0.109375 * seventh - 0.03515625 * ninth) * square * square,
                        -1.0 / 3 + (-0.875 * seventh + 0.46875 * ninth) * square,
                        2.0 / 15 + 1.75 * seventh - 1.6875 * ninth};
        if (kCapDegree == 3) odd[0] -= 0.3125 * odd[2] * square * square, odd[1] += 1.25 * odd[2] * square, odd[2] = 0;
        double power = ratio;
        for (int i = 0; i < 3; ++i, power *= ratio * ratio) unit.odd[i] = static_cast<Accumulator>(odd[i] * power);
    } else if constexpr (!kHasSoftcap) {
        // A multiplier near the end of the range might count as 0, and 0 x -inf is no hidden score. Slopes are divided
        // by it.
        constexpr Accumulator kLeast = kAddsTerms ? 1e-6 : 1e-30, kMost = kAddsTerms ? 1e6 : 1e31;
        const Accumulator multiplier = static_cast<Accumulator>(params.scale * kLog2E);
        const bool is_low = !(multiplier >= kLeast);
        unit.scaled = kBiasDtype != 0 || is_low ||
                      // right either way: beside such scores no slope counts that a division by the factor loses
                      multiplier > kMost;
        if (!unit.scaled) {
            unit.factor = static_cast<Accumulator>(params.scale);
            unit.multiplier = multiplier;
        }
    }
    if constexpr (kHasSoftcap) {
        const double in_bits = 2 * kLog2E * params.scale_by_softcap;
        unit.softcap_in_bits = bounded(static_cast<Accumulator>(in_bits), largest_finite());
    }
    unit.inverse = 1 / unit.factor;
    return unit;
}

// The capped score, in the unit where nothing is added to it.
__device__ __forceinline__ Accumulator capped_score(const LogitUnit& unit, Accumulator score) {
    // tanh(x) = 1 - 2 / (exp(2 x) + 1), to 2e-7 of 1
    const float power = exp2_approximate(score * unit.softcap_in_bits);
    const float capped = multiply_add(-2.0f, reciprocal_approximate(power + 1), 1.0f);
    if constexpr (kUsualSoftcap) return kAddsTerms ? capped * unit.scale.softcap : capped;
    // to 3e-7 of itself, by its series where it is small; tanhf would be as exact, with a branch for each score
    const float x = score * unit.scale.scale_by_softcap, square = x * x;
    float series = multiply_add(square, 62.0f / 2835, -17.0f / 315);
    series = multiply_add(square, series, 2.0f / 15);
    series = multiply_add(square, series, -1.0f / 3);
    const float scaled = score * unit.scale.scale;
    return absolute(x) < 0.35f ? multiply_add(scaled * square, series, scaled) : unit.scale.softcap * capped;
}

__device__ __forceinline__ Accumulator unit_score(const LogitUnit& unit, Accumulator score) {
    if constexpr (kHasSoftcap) return capped_score(unit, score);
    return kBiasDtype != 0 || unit.scaled ? score * unit.scale.scale : score;
}

}  // namespace cuflash
