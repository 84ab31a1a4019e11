/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weighted_template.h - the loops of the vector kernels of 'weighted', 16 channels at a time
 *
 * Both channels of a rotated pair stay in registers. A file of one instruction set includes this after it has defined
 * what kernel_template.h asks for, the type NUMBERS of 16 numbers, and
 *
 *   numbers_load(source), numbers_of(symbols)   16 numbers, or those of 16 symbols (SS_NUMBER_BITS)
 *   numbers_multiply(a, b), numbers_add_product(sum, a, b), numbers_subtract_product(sum, a, b)
 *   numbers_symbols(numbers, steps, centres, most, symbols)   see ss_number_symbol()
 *   round_DTYPE(target, numbers, streamed)      16 elements, past the caches if 'streamed' and the target is aligned
 *
 * What is left of a head is the scalar arithmetic's.
 */
#include "quantize/weighted.h"

#define WEIGH_SYMBOLS(numbers, at, most)                                                                               \
    numbers_symbols(numbers, numbers_load(by->steps + (at)), numbers_load(by->centres + (at)), most, symbols + (at))

#define WEIGH(dtype, size, most)                                                                                       \
    TARGET static int weigh_##dtype(const struct ss_weighing *given, const void *source, int8_t *symbols) {            \
        const struct ss_weighing here = *given, *const by = &here; /* in registers, whatever is written */             \
        const uint8_t *const elements = source;                                                                        \
        int outside = 0;                                                                                               \
                                                                                                                       \
        for (size_t head = 0; head < by->length; head += by->head) {                                                   \
            size_t pair = 0, channel = 2 * by->pairs;                                                                  \
            for (; pair + 16 <= by->pairs; pair += 16) {                                                               \
                const size_t at = head + pair, partner = at + by->pairs;                                               \
                const NUMBERS cosines = numbers_load(by->cosines + pair), sines = numbers_load(by->sines + pair);      \
                const NUMBERS first = widen_##dtype(elements + (size)*at);                                             \
                const NUMBERS second = widen_##dtype(elements + (size)*partner);                                       \
                const NUMBERS back = numbers_add_product(numbers_multiply(first, cosines), second, sines);             \
                const NUMBERS other = numbers_subtract_product(numbers_multiply(second, cosines), first, sines);       \
                outside |= WEIGH_SYMBOLS(back, at, most) | WEIGH_SYMBOLS(other, partner, most);                        \
            }                                                                                                          \
            for (; channel + 16 <= by->head; channel += 16) {                                                          \
                outside |= WEIGH_SYMBOLS(widen_##dtype(elements + (size) * (head + channel)), head + channel, most);   \
            }                                                                                                          \
            outside |= ss_weigh_##dtype##_from(by, head, pair, channel, source, symbols);                              \
        }                                                                                                              \
        return outside;                                                                                                \
    }

TARGET_INLINE NUMBERS numbers_at(const struct ss_weighing *by, const int8_t *symbols, size_t at) {
    return numbers_add_product(numbers_load(by->centres + at), numbers_of(symbols + at), numbers_load(by->steps + at));
}

#define UNWEIGH(dtype, size)                                                                                           \
    TARGET_INLINE void unweigh_##dtype##_to(const struct ss_weighing *given, const int8_t *symbols, uint8_t *target,   \
                                            int streamed) {                                                            \
        const struct ss_weighing here = *given, *const by = &here; /* in registers, whatever is written */             \
        for (size_t head = 0; head < by->length; head += by->head) {                                                   \
            size_t pair = 0, channel = 2 * by->pairs;                                                                  \
            for (; pair + 16 <= by->pairs; pair += 16) {                                                               \
                const size_t at = head + pair, partner = at + by->pairs;                                               \
                const NUMBERS cosines = numbers_load(by->cosines + pair), sines = numbers_load(by->sines + pair);      \
                const NUMBERS first = numbers_at(by, symbols, at), second = numbers_at(by, symbols, partner);          \
                round_##dtype(target + (size)*at,                                                                      \
                              numbers_subtract_product(numbers_multiply(first, cosines), second, sines), streamed);    \
                round_##dtype(target + (size)*partner,                                                                 \
                              numbers_add_product(numbers_multiply(second, cosines), first, sines), streamed);         \
            }                                                                                                          \
            for (; channel + 16 <= by->head; channel += 16) {                                                          \
                const size_t at = head + channel;                                                                      \
                round_##dtype(target + (size)*at, numbers_at(by, symbols, at), streamed);                              \
            }                                                                                                          \
            ss_unweigh_##dtype##_from(by, head, pair, channel, symbols, target);                                       \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    TARGET static void unweigh_##dtype(const struct ss_weighing *by, const int8_t *symbols, void *target,              \
                                       int streamed) {                                                                 \
        const size_t places = (uintptr_t)target | (size)*by->head | (size)*by->pairs;                                  \
        if (streamed && places % (16 * (size)) == 0) {                                                                 \
            unweigh_##dtype##_to(by, symbols, target, 1);                                                              \
        } else {                                                                                                       \
            unweigh_##dtype##_to(by, symbols, target, 0);                                                              \
        }                                                                                                              \
    }

WEIGH(float16, 2, SS_MOST_FLOAT16)
WEIGH(bfloat16, 2, SS_MOST_FLOAT32)
WEIGH(float32, 4, SS_MOST_FLOAT32)
UNWEIGH(float16, 2)
UNWEIGH(bfloat16, 2)
UNWEIGH(float32, 4)
SS_ANGLES(TARGET)
