/* SPDX-License-Identifier: Apache-2.0 */
/*
 * neon.c - the kernels with Advanced SIMD, as every AArch64 CPU has it
 *
 * Sixteen elements at a time; the scalar arithmetic finishes the vectors. What Armv8.2 adds (fp16 arithmetic, dot
 * products) has no use here: results are rounded to float first, and conversions between float16 and float are of
 * Armv8.0.
 *
 * Dequantizing 64 bins or fewer is looking up: a vector has one scale, so its symbols stand for at most 64 elements,
 * whose bytes fit the registers that one instruction (tbl) looks up in. That takes a third of the instructions that the
 * arithmetic does, which makes the table too.
 */
#include "quantize/weighted.h"

#include <arm_neon.h>

#define TARGET

/* Loads and stores of bytes, reinterpreted: elements may be unaligned. */
static inline uint16x8_t load16x8(const void *source, size_t index) {
    return vreinterpretq_u16_u8(vld1q_u8((const uint8_t *)source + 2 * index));
}

static inline uint32x4_t load32x4(const void *source, size_t index) {
    return vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)source + 4 * index));
}

static inline void store16x8(void *target, size_t index, uint16x8_t value) {
    vst1q_u8((uint8_t *)target + 2 * index, vreinterpretq_u8_u16(value));
}

static inline void store32x4(void *target, size_t index, uint32x4_t value) {
    vst1q_u8((uint8_t *)target + 4 * index, vreinterpretq_u8_u32(value));
}

/* ---- What kernel_template.h asks for ------------------------------------------------------------------------- */

#define VECTOR_BYTES 16
#define VECTOR8 uint8x16_t
#define VECTOR16 uint16x8_t
#define VECTOR32 uint32x4_t
#define VECTOR(bits) VECTOR##bits
#define ZERO(bits) vdupq_n_u##bits(0)
#define MAX(bits, a, b) vmaxq_u##bits(a, b)
#define OF_BYTES8(bytes) (bytes)
#define OF_BYTES16(bytes) vreinterpretq_u16_u8(bytes)
#define OF_BYTES32(bytes) vreinterpretq_u32_u8(bytes)
#define MAGNITUDES(bits, source) vandq_u##bits(OF_BYTES##bits(vld1q_u8(source)), vdupq_n_u##bits(INT##bits##_MAX))
#define magnitudes_reduce8 vmaxvq_u8
#define magnitudes_reduce16 vmaxvq_u16
#define magnitudes_reduce32 vmaxvq_u32

struct floats {
    float32x4_t part[4];
};

/* symbols_store() scales, rounds and clamps sixteen numbers to symbols. */
static inline void symbols_store(struct floats numbers, float inverse, int limit, int8_t *target) {
    int32x4_t words[4];
    int16x8_t low, high;
    int8x16_t symbols;

    for (int part = 0; part < 4; part++) {
        words[part] = vcvtnq_s32_f32(vmulq_n_f32(numbers.part[part], inverse));
    }
    low = vqmovn_high_s32(vqmovn_s32(words[0]), words[1]);
    high = vqmovn_high_s32(vqmovn_s32(words[2]), words[3]);
    symbols = vqmovn_high_s16(vqmovn_s16(low), high);
    vst1q_s8(target, vmaxq_s8(vminq_s8(symbols, vdupq_n_s8((int8_t)limit)), vdupq_n_s8((int8_t)-limit)));
}

static inline struct floats floats_of_float16(uint16x8_t first, uint16x8_t second) {
    float16x8_t low = vreinterpretq_f16_u16(first), high = vreinterpretq_f16_u16(second);
    struct floats floats = {{vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
                             vcvt_high_f32_f16(high)}};
    return floats;
}

/* halves_of_float8() shifts a float8 to where a float16 has its sign, exponent and mantissa: as ss_float_of_float8().
 */
static inline uint16x8_t halves_of_float8(uint16x8_t words) {
    return vorrq_u16(vshlq_n_u16(vshrq_n_u16(words, 7), 15), vshrq_n_u16(vshlq_n_u16(words, 9), 2));
}

static inline struct floats widen_float8(const uint8_t *source) {
    uint8x16_t bytes = vld1q_u8(source);
    struct floats floats =
        floats_of_float16(halves_of_float8(vmovl_u8(vget_low_u8(bytes))), halves_of_float8(vmovl_high_u8(bytes)));
    for (int part = 0; part < 4; part++) {
        floats.part[part] = vmulq_n_f32(floats.part[part], 0x1p8f);
    }
    return floats;
}

static inline struct floats widen_float16(const uint8_t *source) {
    return floats_of_float16(load16x8(source, 0), load16x8(source, 8));
}

static inline struct floats widen_bfloat16(const uint8_t *source) {
    uint16x8_t first = load16x8(source, 0), second = load16x8(source, 8);
    struct floats floats = {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(first), 16)),
                             vreinterpretq_f32_u32(vshll_high_n_u16(first, 16)),
                             vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(second), 16)),
                             vreinterpretq_f32_u32(vshll_high_n_u16(second, 16))}};
    return floats;
}

static inline struct floats widen_float32(const uint8_t *source) {
    struct floats floats;
    for (int part = 0; part < 4; part++) {
        floats.part[part] = vreinterpretq_f32_u32(load32x4(source, 4 * (size_t)part));
    }
    return floats;
}

enum { PLANES_STEP16 = 16, PLANES_STEP32 = 16 };

/* rotate_left() is the bytes of elements that are rotated left by one, 'below' the bytes under them; and right. */
static inline uint8x16_t rotate_left(uint8x16_t bytes, uint8x16_t below) {
    return vsriq_n_u8(vshlq_n_u8(bytes, 1), below, 7);
}

static inline uint8x16_t rotate_right(uint8x16_t bytes, uint8x16_t above) {
    return vsliq_n_u8(vshrq_n_u8(bytes, 1), above, 7);
}

static inline void split16_step(const uint8_t *source, uint8_t *planes, size_t stride) {
    const uint8x16x2_t bytes = vld2q_u8(source);
    vst1q_u8(planes, rotate_left(bytes.val[1], bytes.val[0]));
    vst1q_u8(planes + stride, rotate_left(bytes.val[0], bytes.val[1]));
}

static inline void merge16_step(const uint8_t *planes, size_t stride, uint8_t *target, int streamed) {
    const uint8x16_t high = vld1q_u8(planes), low = vld1q_u8(planes + stride);
    const uint8x16x2_t bytes = {{rotate_right(low, high), rotate_right(high, low)}};
    (void)streamed;
    vst2q_u8(target, bytes);
}

static inline void split32_step(const uint8_t *source, uint8_t *planes, size_t stride) {
    const uint8x16x4_t bytes = vld4q_u8(source);
    for (int plane = 0; plane < 4; plane++) {
        vst1q_u8(planes + (size_t)plane * stride, rotate_left(bytes.val[3 - plane], bytes.val[(3 - plane + 3) % 4]));
    }
}

static inline void merge32_step(const uint8_t *planes, size_t stride, uint8_t *target, int streamed) {
    uint8x16_t plane[4];
    uint8x16x4_t bytes;
    (void)streamed;
    for (int number = 0; number < 4; number++) {
        plane[number] = vld1q_u8(planes + (size_t)number * stride);
    }
    for (int byte = 0; byte < 4; byte++) {
        bytes.val[byte] = rotate_right(plane[3 - byte], plane[(3 - byte + 3) % 4]);
    }
    vst4q_u8(target, bytes);
}

#include "quantize/kernel_template.h"

/* ---- Binned: dequantize -------------------------------------------------------------------------------------- */

static inline struct floats values_of(int8x16_t symbols, float scale) {
    int16x8_t low = vmovl_s8(vget_low_s8(symbols)), high = vmovl_high_s8(symbols);
    struct floats values = {{vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), scale),
                             vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(low)), scale),
                             vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), scale),
                             vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(high)), scale)}};
    return values;
}

/* Sixteen elements of two bytes, or of one in the lower half of each lane. */
typedef uint16x8x2_t elements_of(struct floats values);

/* bfloat16_carry() adds what rounds the upper half of each number: 0x7FFF, and 1 where that half is odd. */
static inline uint16x8_t bfloat16_carry(float32x4_t values) {
    uint32x4_t bits = vreinterpretq_u32_f32(values);
    bits = vsraq_n_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), vshlq_n_u32(bits, 15), 31);
    return vreinterpretq_u16_u32(bits);
}

static inline uint16x8x2_t bfloat16_of(struct floats values) {
    uint16x8x2_t elements = {{vuzp2q_u16(bfloat16_carry(values.part[0]), bfloat16_carry(values.part[1])),
                              vuzp2q_u16(bfloat16_carry(values.part[2]), bfloat16_carry(values.part[3]))}};
    return elements;
}

static inline uint16x8x2_t float16_of(struct floats values) {
    uint16x8x2_t elements = {{vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(values.part[0]), values.part[1])),
                              vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(values.part[2]), values.part[3]))}};
    return elements;
}

/* float8_round() leaves the float8 of ss_float8_of_float() in the lower byte of each lane. */
static inline uint16x4_t float8_round(float32x4_t values) {
    const float32x4_t steps = vdupq_n_f32(SS_FLOAT8_STEPS);
    uint32x4_t sign = vshlq_n_u32(vshrq_n_u32(vreinterpretq_u32_f32(values), 31), 7);
    float32x4_t magnitude = vminq_f32(vabsq_f32(values), vdupq_n_f32(SS_FLOAT8_MAX));
    uint32x4_t small = vcltq_f32(magnitude, vdupq_n_f32(SS_FLOAT8_NORMAL_MIN));
    uint32x4_t bits = vreinterpretq_u32_f32(magnitude);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 20), vdupq_n_u32(1));
    uint32x4_t normal = vaddq_u32(vsubq_u32(bits, vdupq_n_u32(0x3C000000 - 0x7FFFF)), odd);
    uint32x4_t subnormal = vsubq_u32(vreinterpretq_u32_f32(vaddq_f32(magnitude, steps)), vreinterpretq_u32_f32(steps));
    return vmovn_u32(vorrq_u32(sign, vbslq_u32(small, subnormal, vshrq_n_u32(normal, 20))));
}

static inline uint16x8x2_t float8_of(struct floats values) {
    uint16x8x2_t elements = {{vcombine_u16(float8_round(values.part[0]), float8_round(values.part[1])),
                              vcombine_u16(float8_round(values.part[2]), float8_round(values.part[3]))}};
    return elements;
}

/* The symbols that a table has elements of: TABLE_FIRST and the next ones. It pays in vectors of TABLE_LENGTH_MIN. */
enum { TABLE_FIRST = -32, TABLE_SIZE = 64, TABLE_LENGTH_MIN = 128 };

struct table {
    uint8x16x4_t low, high; /* bytes of the elements */
};

static inline __attribute__((always_inline)) struct table table_make(float scale, elements_of *elements_of_values) {
    static const int8_t counting[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    struct table table;

    for (int part = 0; part < TABLE_SIZE / 16; part++) {
        int8x16_t symbols = vaddq_s8(vld1q_s8(counting), vdupq_n_s8((int8_t)(TABLE_FIRST + 16 * part)));
        uint16x8x2_t elements = elements_of_values(values_of(symbols, scale));
        uint8x16_t first = vreinterpretq_u8_u16(elements.val[0]), second = vreinterpretq_u8_u16(elements.val[1]);
        table.low.val[part] = vuzp1q_u8(first, second);
        table.high.val[part] = vuzp2q_u8(first, second);
    }
    return table;
}

/* elements_store() writes sixteen elements of 'size' bytes. */
static inline void elements_store(uint8x16_t low, uint8x16_t high, size_t size, uint8_t *target) {
    const uint8x16x2_t both = {{low, high}};
    if (size == 2) {
        vst2q_u8(target, both);
    } else {
        vst1q_u8(target, low);
    }
}

/*
 * vector_look_up() dequantizes the sixteens of a vector by its table, and returns whether that has all the symbols;
 * what it wrote is of no meaning otherwise.
 */
static inline __attribute__((always_inline)) int vector_look_up(const int8_t *symbols, size_t count, float scale,
                                                                size_t size, uint8_t *target,
                                                                elements_of *elements_of_values) {
    const struct table table = table_make(scale, elements_of_values);
    uint8x16_t most = vdupq_n_u8(0);

    for (size_t index = 0; index + 16 <= count; index += 16) {
        uint8x16_t slot = vsubq_u8(vld1q_u8((const uint8_t *)symbols + index), vdupq_n_u8((uint8_t)TABLE_FIRST));
        most = vmaxq_u8(most, slot);
        elements_store(vqtbl4q_u8(table.low, slot), vqtbl4q_u8(table.high, slot), size, target + size * index);
    }
    return vmaxvq_u8(most) < TABLE_SIZE;
}

static inline __attribute__((always_inline)) void vector_compute(const int8_t *symbols, size_t count, float scale,
                                                                 size_t size, uint8_t *target,
                                                                 elements_of *elements_of_values) {
    for (size_t index = 0; index + 16 <= count; index += 16) {
        uint16x8x2_t elements = elements_of_values(values_of(vld1q_s8(symbols + index), scale));
        if (size == 2) {
            store16x8(target, index, elements.val[0]);
            store16x8(target, index + 8, elements.val[1]);
        } else {
            vst1q_u8(target + index, vmovn_high_u16(vmovn_u16(elements.val[0]), elements.val[1]));
        }
    }
}

/* unbin() is an unbin[] member. Vectors are looked up until one has a symbol that the table has not: more bins. */
static inline __attribute__((always_inline)) void unbin(const int8_t *symbols, const uint8_t *scales, size_t vectors,
                                                        size_t vector_length, uint8_t *target, size_t size,
                                                        elements_of *elements_of_values,
                                                        void (*finish)(size_t, const int8_t *, size_t, float, void *)) {
    int few_bins = vector_length >= TABLE_LENGTH_MIN;

    for (size_t vector = 0; vector < vectors; vector++) {
        const float scale = ss_float_of_bits(ss_load32(scales, vector));
        few_bins = few_bins && vector_look_up(symbols, vector_length, scale, size, target, elements_of_values);
        if (!few_bins) {
            vector_compute(symbols, vector_length, scale, size, target, elements_of_values);
        }
        finish(vector_length / 16 * 16, symbols, vector_length, scale, target);
        symbols += vector_length;
        target += vector_length * size;
    }
}

#define UNBIN(dtype, size)                                                                                             \
    static void unbin_##dtype(const int8_t *symbols, const uint8_t *scales, size_t vectors, size_t vector_length,      \
                              uint8_t *target) {                                                                       \
        unbin(symbols, scales, vectors, vector_length, target, size, dtype##_of, ss_unbin_##dtype##_from);             \
    }

UNBIN(float8, 1)
UNBIN(float16, 2)
UNBIN(bfloat16, 2)

static inline void unbin_float32_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    size_t index = 0;

    for (; index + 16 <= count; index += 16) {
        struct floats values = values_of(vld1q_s8(symbols + index), scale);
        for (int part = 0; part < 4; part++) {
            store32x4(target, index + 4 * (size_t)part, vreinterpretq_u32_f32(values.part[part]));
        }
    }
    ss_unbin_float32_from(index, symbols, count, scale, target);
}

SS_UNBIN_BATCH(, unbin_float32, unbin_float32_vector, 4)

/* ---- Weighted: what weighted_template.h asks for ------------------------------------------------------------- */

#define NUMBERS struct floats
#define TARGET_INLINE static inline

static inline struct floats numbers_load(const float *source) {
    struct floats floats;
    for (size_t part = 0; part < 4; part++) {
        floats.part[part] = vld1q_f32(source + 4 * part);
    }
    return floats;
}

static inline struct floats numbers_of(const int8_t *symbols) {
    static const uint8_t order[16] = {255, 0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3, 255, 255};
    const uint8x16_t bytes = vld1q_u8((const uint8_t *)symbols), first = vld1q_u8(order);
    struct floats floats;

    for (int part = 0; part < 4; part++) {
        const uint8x16_t place =
            vreinterpretq_u8_u32(vaddq_u32(vreinterpretq_u32_u8(first), vdupq_n_u32(0x400u * (uint32_t)part)));
        const uint32x4_t byte = vreinterpretq_u32_u8(vqtbl1q_u8(bytes, place));
        floats.part[part] = vreinterpretq_f32_u32(veorq_u32(byte, vdupq_n_u32(SS_NUMBER_BITS)));
    }
    return floats;
}

static inline struct floats numbers_multiply(struct floats a, struct floats b) {
    for (int part = 0; part < 4; part++) {
        a.part[part] = vmulq_f32(a.part[part], b.part[part]);
    }
    return a;
}

static inline struct floats numbers_add_product(struct floats sum, struct floats a, struct floats b) {
    for (int part = 0; part < 4; part++) {
        sum.part[part] = vfmaq_f32(sum.part[part], a.part[part], b.part[part]);
    }
    return sum;
}

static inline struct floats numbers_subtract_product(struct floats sum, struct floats a, struct floats b) {
    for (int part = 0; part < 4; part++) {
        sum.part[part] = vfmsq_f32(sum.part[part], a.part[part], b.part[part]);
    }
    return sum;
}

static inline int numbers_symbols(struct floats values, struct floats steps, struct floats centres, float most,
                                  int8_t *symbols) {
    uint32x4_t inside = vdupq_n_u32(UINT32_MAX);
    int32x4_t words[4];

    for (int part = 0; part < 4; part++) {
        float32x4_t value = values.part[part], step = steps.part[part];
        float32x4_t number = vdivq_f32(vsubq_f32(value, centres.part[part]), step);
        inside = vandq_u32(inside, vcaleq_f32(number, vdupq_n_f32(SS_WEIGHTED_LIMIT)));
        inside = vandq_u32(inside, vcleq_f32(vaddq_f32(vabsq_f32(value), step), vdupq_n_f32(most)));
        words[part] = vcvtnq_s32_f32(number);
    }
    vst1q_s8(symbols, vqmovn_high_s16(vqmovn_s16(vqmovn_high_s32(vqmovn_s32(words[0]), words[1])),
                                      vqmovn_high_s32(vqmovn_s32(words[2]), words[3])));
    return vminvq_u32(inside) == 0;
}

static inline void round_float16(uint8_t *target, struct floats values, int streamed) {
    uint16x8x2_t halves = float16_of(values);
    (void)streamed;
    store16x8(target, 0, halves.val[0]);
    store16x8(target, 8, halves.val[1]);
}

static inline void round_bfloat16(uint8_t *target, struct floats values, int streamed) {
    (void)streamed;
    for (size_t half = 0; half < 2; half++) {
        const uint16x8_t low = vreinterpretq_u16_f32(values.part[2 * half]);
        const uint16x8_t high = vreinterpretq_u16_f32(values.part[2 * half + 1]);
        store16x8(target, 8 * half, vuzp2q_u16(low, high));
    }
}

static inline void round_float32(uint8_t *target, struct floats values, int streamed) {
    (void)streamed;
    for (size_t part = 0; part < 4; part++) {
        store32x4(target, 4 * part, vreinterpretq_u32_f32(values.part[part]));
    }
}

#include "quantize/weighted_template.h"

const struct ss_quantize_kernels ss_quantize_kernels_neon = {
    SS_QUANTIZE_KERNELS,
};
