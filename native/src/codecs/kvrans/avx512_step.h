/* SPDX-License-Identifier: Apache-2.0 */
/*
 * avx512_step.h - one symbol for each of 64 lanes: the inner loop of the AVX-512 decoders of kvrans
 *
 * Any table is looked up by slots: four registers hold the index of each. Most tables have few places where a symbol
 * begins or ends inside of four aligned slots. Then a look-up by a slot's upper six bits, in one register, gives an
 * entry: that of the symbol which has all four slots, or the first of four entries, one a slot. Frequencies, starts and
 * values are looked up by entry.
 */
#ifndef SS_KVRANS_AVX512_STEP_H
#define SS_KVRANS_AVX512_STEP_H

#include "codecs/kvrans/avx512.h"

/* coded_load() loads 64 bytes into a register for sure: expanding them from memory is microcode on some CPUs. */
TARGET_INLINE __m512i coded_load(const uint8_t *next) {
    __m512i bytes = _mm512_loadu_si512(next);
    __asm__("" : "+v"(bytes));
    return bytes;
}

/* ---- Any tables ---------------------------------------------------------------------------------------------- */

struct registers {
    __m512i index[4], frequency, start;
};

TARGET_INLINE struct registers registers_load(const struct ss_kvrans_table *table) {
    struct registers loaded = {.frequency = _mm512_load_si512(table->frequency),
                               .start = _mm512_load_si512(table->start)};
    for (int part = 0; part < 4; part++) {
        loaded.index[part] = _mm512_load_si512(table->index + 64 * part);
    }
    return loaded;
}

/* step() decodes one symbol for each of 64 lanes and returns their indices. */
TARGET_INLINE __m512i step(const struct registers *table, __m512i *low, __m512i *high, __mmask64 active,
                           const uint8_t **next) {
    const __m512i bytes = _mm512_set1_epi16(0x00FF), upper = _mm512_set1_epi16((short)0xFF00);
    __m512i index = _mm512_mask_blend_epi8(_mm512_movepi8_mask(*low),
                                           _mm512_permutex2var_epi8(table->index[0], *low, table->index[1]),
                                           _mm512_permutex2var_epi8(table->index[2], *low, table->index[3]));
    __m512i frequency = _mm512_permutexvar_epi8(index, table->frequency);
    __m512i offset = _mm512_sub_epi8(*low, _mm512_permutexvar_epi8(index, table->start));
    __m512i even = _mm512_mullo_epi16(_mm512_and_si512(*high, bytes), _mm512_and_si512(frequency, bytes));
    __m512i odd = _mm512_mulhi_epu16(_mm512_and_si512(*high, upper), _mm512_and_si512(frequency, upper));
    __m512i new_low, new_high;
    __mmask64 need;

    even = _mm512_add_epi16(even, _mm512_and_si512(offset, bytes));
    odd = _mm512_add_epi16(odd, _mm512_srli_epi16(offset, 8));
    /* 0xF8: a | (b & c) */
    new_high = _mm512_ternarylogic_epi64(_mm512_srli_epi16(even, 8), odd, upper, 0xF8);
    new_low = _mm512_ternarylogic_epi64(_mm512_slli_epi16(odd, 8), even, bytes, 0xF8);
    need = _mm512_mask_testn_epi8_mask(active, new_high, new_high);
    new_high = _mm512_mask_mov_epi8(new_high, need, new_low);
    new_low = _mm512_mask_expand_epi8(new_low, need, coded_load(*next));
    *high =
        _mm512_mask_mov_epi8(*high, active, new_high); /* a lane may be active in one group of rows, not in another */
    *low = _mm512_mask_mov_epi8(*low, active, new_low);
    *next += _mm_popcnt_u64(need);
    return index;
}

/* ---- Tables of few entries ----------------------------------------------------------------------------------- */

/* A table by quarters of its slots: the first entry, and which of a slot's lowest bits are added to it; and by entry.
 */
struct quarters {
    _Alignas(64) uint8_t first[64];
    uint8_t within[64];
    uint8_t frequency[64];
    uint8_t start[64];
    uint8_t value[64];
};

/* every_fourth() returns the bytes 'number', 'number' + 4 and so on of a table's slots. */
TARGET_INLINE __m512i every_fourth(const uint8_t *slots, unsigned int number) {
    __m512i found = _mm512_setzero_si512();

#define PART(part)                                                                                                     \
    found = _mm512_inserti32x4(                                                                                        \
        found, _mm512_cvtepi32_epi8(_mm512_srli_epi32(_mm512_load_si512(slots + 64 * (part)), 8 * number)), part);
    PART(0)
    PART(1)
    PART(2)
    PART(3)
#undef PART
    return found;
}

/* Result of quarters_make(). */
enum fit {
    FIT_NOT,   /* too many entries */
    FIT,       /* all frequencies are under 128 */
    FIT_LARGE, /* some are larger: bit 7 of their entries is set */
};

/* quarters_make() lays out one table, unless its entries are too many; 'values' are by index. */
TARGET static enum fit quarters_make(const struct ss_kvrans_table *table, __m512i values, struct quarters *made) {
    const __m512i zero = _mm512_setzero_si512(), numbered = _mm512_load_si512(numbers), three = _mm512_set1_epi8(3);
    const __m512i frequency = _mm512_load_si512(table->frequency), start = _mm512_load_si512(table->start);
    const __m512i last = _mm512_sub_epi8(_mm512_add_epi8(start, frequency), _mm512_set1_epi8(1));
    const __m512i begin = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(start, 2), _mm512_set1_epi8(63)),
                                          _mm512_movm_epi8(_mm512_test_epi8_mask(start, three)));
    const __m512i end =
        _mm512_and_si512(_mm512_srli_epi16(_mm512_avg_epu8(last, zero), 1), _mm512_set1_epi8(127)); /* (last + 1) / 4 */
    const __mmask64 whole = _mm512_cmplt_epu8_mask(begin, end) & _mm512_test_epi8_mask(frequency, frequency);
    const __m512i of_slot[4] = {every_fourth(table->index, 0), every_fourth(table->index, 1),
                                every_fourth(table->index, 2), every_fourth(table->index, 3)};
    const __mmask64 parted = _mm512_cmpneq_epi8_mask(of_slot[0], of_slot[3]);
    const __mmask64 large = _mm512_movepi8_mask(frequency);
    const int fours = 4 * (int)_mm_popcnt_u64(parted);
    __m512i rank, first, indices = zero;

    if (fours + (int)_mm_popcnt_u64(whole) > 64 ||
        _mm512_mask_test_epi8_mask(large, _mm512_or_si512(start, frequency), three) != 0) {
        return FIT_NOT;
    }
    rank = _mm512_add_epi8(_mm512_maskz_expand_epi8(whole, numbered), _mm512_set1_epi8((char)fours));
    rank = _mm512_or_si512(rank, _mm512_maskz_set1_epi8(large, (char)0x80));
    first = _mm512_permutexvar_epi8(of_slot[0], rank);
    first =
        _mm512_mask_expand_epi8(first, parted, _mm512_slli_epi16(numbered, 2)); /* no number reaches the next byte */
    for (int slot = 3; slot >= 0; slot--) {
        const __m512i ones = _mm512_maskz_compress_epi8(parted, of_slot[slot]);
        indices = _mm512_or_si512(_mm512_slli_epi32(indices, 8), _mm512_cvtepu8_epi32(_mm512_castsi512_si128(ones)));
    }
    indices = _mm512_mask_expand_epi8(indices, ~mask_of((size_t)fours), _mm512_maskz_compress_epi8(whole, numbered));
    _mm512_store_si512(made->first, first);
    _mm512_store_si512(made->within, _mm512_maskz_mov_epi8(parted, three));
    _mm512_store_si512(made->frequency, _mm512_permutexvar_epi8(indices, frequency));
    _mm512_store_si512(made->start, _mm512_permutexvar_epi8(indices, start));
    _mm512_store_si512(made->value, _mm512_permutexvar_epi8(indices, values));
    return large != 0 ? FIT_LARGE : FIT;
}

/* quarters_all() lays out the tables of a block, unless one of them does not fit. */
TARGET static enum fit quarters_all(const struct ss_kvrans_block *block, struct quarters *made) {
    const __m512i values = _mm512_load_si512(block->value);
    __m512i last = _mm512_setzero_si512();
    enum fit fit = FIT;

    for (uint32_t column = 0; column < block->columns; column += 64) {
        last = _mm512_max_epu8(last,
                               _mm512_maskz_loadu_epi8(mask_of(block->columns - column), block->column_table + column));
    }
    for (uint32_t number = 0; _mm512_cmpge_epu8_mask(last, _mm512_set1_epi8((char)number)) != 0; number++) {
        const enum fit its = quarters_make(&block->tables[number], values, &made[number]);
        if (its == FIT_NOT) {
            return FIT_NOT;
        }
        fit = its > fit ? its : fit;
    }
    return fit;
}

struct quarter_registers {
    __m512i first, within, frequency, start, value;
};

TARGET_INLINE struct quarter_registers quarters_load(const struct quarters *table) {
    return (struct quarter_registers){.first = _mm512_load_si512(table->first),
                                      .within = _mm512_load_si512(table->within),
                                      .frequency = _mm512_load_si512(table->frequency),
                                      .start = _mm512_load_si512(table->start),
                                      .value = _mm512_load_si512(table->value)};
}

/*
 * quarters_step() decodes one symbol for each of 64 lanes and returns their values. A multiplication of bytes adds up
 * two products: that of the state's high byte and the frequency, and that of the low byte and 1. So the low byte of the
 * even lanes is moved to the odd ones, and the other way round. The start is subtracted after that: the product need
 * not wait for it. Frequencies are signed there: of what is 128 or more, 256 is missing, that is, the state's high byte
 * is missing in the new high byte.
 */
TARGET_INLINE __m512i quarters_step(const struct quarter_registers *table, int large, __m512i *low, __m512i *high,
                                    const uint8_t **next) {
    const __mmask64 evens = 0x5555555555555555, odds = ~evens;
    const __m512i ones = _mm512_set1_epi8(1), quarter = _mm512_srli_epi16(*low, 2); /* six bits of each are used */
    const __m512i entry =                                                           /* 0xF8: a | (b & c) */
        _mm512_ternarylogic_epi64(_mm512_permutexvar_epi8(quarter, table->first), *low,
                                  _mm512_permutexvar_epi8(quarter, table->within), 0xF8);
    const __m512i moved = _mm512_shldi_epi16(*low, *low, 8), start = _mm512_permutexvar_epi8(entry, table->start);
    const __m512i even_product = _mm512_maddubs_epi16(
        _mm512_mask_mov_epi8(*high, odds, moved), _mm512_mask_permutexvar_epi8(ones, evens, entry, table->frequency));
    const __m512i odd_product = _mm512_maddubs_epi16(_mm512_mask_mov_epi8(*high, evens, moved),
                                                     _mm512_mask_permutexvar_epi8(ones, odds, entry, table->frequency));
    const __m512i even = _mm512_sub_epi16(even_product, _mm512_and_si512(start, _mm512_set1_epi16(0x00FF)));
    const __m512i odd = _mm512_sub_epi16(odd_product, _mm512_srli_epi16(start, 8));
    const __m512i mixed =
        _mm512_shldi_epi16(odd, even, 8); /* high bytes of the even lanes, low bytes of the odd ones */
    const __m512i new_low = _mm512_mask_mov_epi8(even, odds, mixed);
    __m512i new_high = _mm512_mask_mov_epi8(mixed, odds, odd);
    __mmask64 need;

    if (large) {
        new_high = _mm512_mask_add_epi8(new_high, _mm512_movepi8_mask(entry), new_high, *high);
    }
    need = _mm512_testn_epi8_mask(new_high, new_high);
    *high = _mm512_mask_mov_epi8(new_high, need, new_low);
    *low = _mm512_mask_expand_epi8(new_low, need, coded_load(*next));
    *next += _mm_popcnt_u64(need);
    return _mm512_permutexvar_epi8(entry, table->value);
}

#endif /* SS_KVRANS_AVX512_STEP_H */
