/* SPDX-License-Identifier: Apache-2.0 */
/*
 * literal_inflate.c - Deflate without matches, several streams in turns
 *
 * Decoding a Huffman code is one chain of dependent steps: look up the next bits in a table, shift by the length that
 * the table says, look up again. Each look-up waits for the one before it, about eight cycles, of which a core could
 * do forty other instructions. A general decoder cannot fill them. We can: our own streams (huffman_deflate.c) hold no
 * matches, so a step has one form, with no branch in it, and a pipeline has several slices waiting. So up to
 * SS_LITERAL_INFLATE_LANES streams advance in lockstep, one look-up each in turn, and their waits overlap.
 *
 *   table entry = up to 3 literals in bytes 0 to 2; the bits of their codes << 24; their number << 30
 *
 * - One look-up stores four bytes, advances the target by the number of literals and shifts by the number of bits.
 * - An entry that is no literal (the end of the block, a code longer than the table's index, a match) is 0: it moves
 *   nothing, so every later look-up finds it again. That is noticed once for each refill of the bits, not at each
 *   look-up. A long code is decoded on the spot; for the rest lane_advance() takes over until literals come again.
 * - LOOKUPS * TABLE_BITS are at most the 56 bits that a refill guarantees.
 * - The lockstep runs for a number of rounds in which no lane can come near the end of its source or target; so it
 *   compares nothing with an end. The last bytes of a stream come one code at a time.
 *
 * Smaller tables are built faster and leave more of the first-level cache, larger ones hold more literals in an entry.
 *
 * This decoder rejects any stream that is not a valid stream of literals; the caller's full decoder then decides. So
 * only accepted streams must be correct: codes are complete, stored lengths match their complements, and source and
 * target end with the final block. The rules are zlib's, without matches and incomplete codes of literals.
 */
#include "codecs/literal_inflate.h"

#include <stdlib.h>
#include <string.h>

#include "cpu/cpu.h"

enum {
    LANES = SS_LITERAL_INFLATE_LANES,
    TABLE_BITS = 11,
    TABLE_SIZE = 1 << TABLE_BITS,
    REFILLED_BITS = 56,
    LOOKUPS = REFILLED_BITS / TABLE_BITS,
    LITERALS_MAX = 3, /* of one entry */
    LENGTH_SHIFT = 24,
    COUNT_SHIFT = 30,
    CODE_LENGTH_MAX = 15,
    LITERALS = 256,
    END_OF_BLOCK = 256,
    LITERAL_CODES_MAX = 286,
    FIXED_LITERAL_CODES = 288,
    DISTANCE_CODES_MAX = 30,
    PRECODE_CODES = 19,
    PRECODE_BITS = 7,
    REPEAT_PREVIOUS = 16,
    REPEAT_ZERO_SHORT = 17,
    BLOCK_STORED = 0,
    BLOCK_FIXED = 1,
    BLOCK_DYNAMIC = 2,
};

#define ENTRY_LITERAL (1u << COUNT_SHIFT)

_Static_assert(LOOKUPS *TABLE_BITS <= REFILLED_BITS, "a refill must last for all look-ups");
_Static_assert((LOOKUPS - 1) * LITERALS_MAX + 4 <= 16, "a round must not store more than 16 bytes");

/* A complete canonical code (RFC 1951 section 3.2.2), for decoding any symbol of any length. */
struct code {
    uint16_t counts[CODE_LENGTH_MAX + 1];  /* symbols of each length */
    uint16_t sorted[FIXED_LITERAL_CODES];  /* symbols, by length, then by number */
    uint32_t limits[CODE_LENGTH_MAX + 1];  /* behind the last code of a length, as CODE_LENGTH_MAX bits */
    uint32_t offsets[CODE_LENGTH_MAX + 1]; /* from a code to its place in 'sorted', modulo 2^32 */
};

/* One stream on its way. 'table' and 'code' are those of the block that it is in. */
struct lane {
    uint32_t table[TABLE_SIZE];
    struct code code;
    struct ss_stream *stream;
    const uint8_t *source; /* next byte that is not in 'bits' */
    const uint8_t *source_end;
    uint8_t *target;
    uint8_t *target_end;
    uint64_t bits;  /* lowest first; above 'count', zero or what is at 'source' */
    uint64_t count; /* of them, 63 at most */
    int in_block;   /* in the codes of a fixed or dynamic block */
    int final;      /* that block, or the one before, is the last */
};

struct ss_literal_inflater {
    uint32_t singles[TABLE_SIZE]; /* table of one literal for each entry, while a table is made */
    struct lane lanes[LANES];
};

enum lane_state { LANE_RUNS, LANE_DONE, LANE_FAILED };

/* ---- Bits ---------------------------------------------------------------------------------------------------- */

/* bits_refill() gets at least REFILLED_BITS, or all there are. */
static void bits_refill(struct lane *lane) {
    if (lane->source_end - lane->source >= 8) {
        uint64_t word;
        memcpy(&word, lane->source, sizeof word);
        lane->bits |= word << lane->count;
        lane->source += (lane->count ^ 63) >> 3;
        lane->count |= REFILLED_BITS;
        return;
    }
    while (lane->count < REFILLED_BITS && lane->source < lane->source_end) {
        lane->bits |= (uint64_t)*lane->source++ << lane->count;
        lane->count += 8;
    }
}

static void bits_drop(struct lane *lane, unsigned count) {
    lane->bits >>= count;
    lane->count -= count;
}

/* bits_take() takes up to 16 bits; returns 0 where the source ends before. */
static int bits_take(struct lane *lane, unsigned count, unsigned *value) {
    if (lane->count < count) {
        bits_refill(lane);
    }
    if (lane->count < count) {
        return 0;
    }
    *value = (unsigned)(lane->bits & ((1u << count) - 1));
    bits_drop(lane, count);
    return 1;
}

/* ---- Tables -------------------------------------------------------------------------------------------------- */

/* lengths_fill() returns how much of the code space 'count' code lengths take, in codes of CODE_LENGTH_MAX bits. */
static uint32_t lengths_fill(const uint8_t *lengths, unsigned count) {
    uint32_t taken = 0;

    for (unsigned symbol = 0; symbol < count; symbol++) {
        taken += lengths[symbol] != 0 ? 1u << (CODE_LENGTH_MAX - lengths[symbol]) : 0;
    }
    return taken;
}

/* code_make() returns 0 unless the code is complete. */
static int code_make(struct code *code, const uint8_t *lengths, unsigned symbol_count) {
    uint16_t starts[CODE_LENGTH_MAX + 2] = {0};
    uint32_t next = 0, before = 0;

    memset(code->counts, 0, sizeof(code->counts));
    for (unsigned symbol = 0; symbol < symbol_count; symbol++) {
        code->counts[lengths[symbol]]++;
    }
    code->counts[0] = 0;
    for (unsigned length = 1; length <= CODE_LENGTH_MAX; length++) {
        next <<= 1;
        code->offsets[length] = before - next;
        starts[length] = (uint16_t)before;
        next += code->counts[length];
        before += code->counts[length];
        code->limits[length] = next << (CODE_LENGTH_MAX - length);
        if (next > 1u << length) {
            return 0;
        }
    }
    if (next != 1u << CODE_LENGTH_MAX) {
        return 0;
    }
    for (unsigned symbol = 0; symbol < symbol_count; symbol++) {
        if (lengths[symbol] != 0) {
            code->sorted[starts[lengths[symbol]]++] = (uint16_t)symbol;
        }
    }
    return 1;
}

/*
 * singles_make() fills a table of 1 << 'table_bits' entries of one symbol each; those of symbols from 'symbol_limit' on
 * and of longer codes are 0. Codes of one length come in order, and the table doubles from one length to the next, so
 * every code is written once.
 */
static void singles_make(const struct code *code, unsigned table_bits, unsigned symbol_limit, uint32_t *table) {
    const uint16_t *symbol = code->sorted;
    uint32_t reversed = 0; /* the next code */

    table[0] = 0;
    for (unsigned length = 1; length <= table_bits; length++) {
        uint32_t half = 1u << (length - 1);

        memcpy(table + half, table, half * sizeof *table);
        for (unsigned left = code->counts[length]; left > 0; left--, symbol++) {
            uint32_t bit = half;

            table[reversed] = *symbol < symbol_limit ? *symbol | length << LENGTH_SHIFT | ENTRY_LITERAL : 0;
            for (; reversed & bit; bit >>= 1) {
                reversed ^= bit;
            }
            reversed |= bit;
        }
    }
}

/* table_make() joins to each literal those whose codes the rest of the index holds. Entries of 0 add nothing. */
static void table_make(uint32_t *table, const uint32_t *singles) {
    for (uint32_t index = 0; index < TABLE_SIZE; index++) {
        uint32_t first = singles[index], second, third;
        uint32_t used = first >> LENGTH_SHIFT & 63;

        second = singles[index >> used];
        used += second >> LENGTH_SHIFT & 63;
        third = singles[index >> (used & 31)];
        second = used <= TABLE_BITS ? second : 0;
        used += third >> LENGTH_SHIFT & 63;
        third = used <= TABLE_BITS ? third : 0;
        table[index] =
            first + (second & 0xFF000000) + ((second & 0xFF) << 8) + (third & 0xFF000000) + ((third & 0xFF) << 16);
    }
}

/* ---- Blocks -------------------------------------------------------------------------------------------------- */

static int stored_copy(struct lane *lane) {
    size_t length;

    bits_drop(lane, lane->count & 7);
    lane->source -= lane->count >> 3;
    lane->bits = 0;
    lane->count = 0;
    if (lane->source_end - lane->source < 4) {
        return 0;
    }
    length = lane->source[0] | (size_t)lane->source[1] << 8;
    if (length != ((lane->source[2] | (size_t)lane->source[3] << 8) ^ 0xFFFF)) {
        return 0;
    }
    lane->source += 4;
    if (length > (size_t)(lane->source_end - lane->source) || length > (size_t)(lane->target_end - lane->target)) {
        return 0;
    }
    memcpy(lane->target, lane->source, length);
    lane->source += length;
    lane->target += length;
    return 1;
}

/* precode_read() makes the table of the code that code lengths are coded with. */
static int precode_read(struct lane *lane, unsigned count, uint32_t *table) {
    static const uint8_t order[PRECODE_CODES] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    uint8_t lengths[PRECODE_CODES] = {0};

    for (unsigned index = 0; index < count; index++) {
        unsigned length;
        if (!bits_take(lane, 3, &length)) {
            return 0;
        }
        lengths[order[index]] = (uint8_t)length;
    }
    if (!code_make(&lane->code, lengths, PRECODE_CODES)) {
        return 0;
    }
    singles_make(&lane->code, PRECODE_BITS, PRECODE_CODES, table);
    return 1;
}

/* lengths_read() reads 'count' code lengths (RFC 1951 section 3.2.7). */
static int lengths_read(struct lane *lane, const uint32_t *table, uint8_t *lengths, unsigned count) {
    static const uint8_t extra_bits[3] = {2, 3, 7}, repeat_least[3] = {3, 3, 11};

    for (unsigned index = 0; index < count;) {
        unsigned symbol, length, repeat;
        uint32_t entry;

        if (lane->count < PRECODE_BITS + 7) {
            bits_refill(lane);
        }
        entry = table[lane->bits & ((1u << PRECODE_BITS) - 1)];
        symbol = entry & 0xFF;
        length = entry >> LENGTH_SHIFT & 63;
        if (length > lane->count) {
            return 0;
        }
        bits_drop(lane, length);
        if (symbol < REPEAT_PREVIOUS) {
            lengths[index++] = (uint8_t)symbol;
            continue;
        }
        if ((symbol == REPEAT_PREVIOUS && index == 0) ||
            !bits_take(lane, extra_bits[symbol - REPEAT_PREVIOUS], &repeat)) {
            return 0;
        }
        repeat += repeat_least[symbol - REPEAT_PREVIOUS];
        if (repeat > count - index) {
            return 0;
        }
        memset(lengths + index, symbol == REPEAT_PREVIOUS ? lengths[index - 1] : 0, repeat);
        index += repeat;
    }
    return 1;
}

/* distances_are_valid() accepts what zlib does: a complete code, a single one of one bit, or none. No code is used. */
static int distances_are_valid(const uint8_t *lengths, unsigned count) {
    unsigned used = 0, longest = 0;

    for (unsigned symbol = 0; symbol < count; symbol++) {
        used += lengths[symbol] != 0;
        longest = lengths[symbol] > longest ? lengths[symbol] : longest;
    }
    return used == 0 || (used == 1 && longest == 1) || lengths_fill(lengths, count) == 1u << CODE_LENGTH_MAX;
}

/* codes_read() gets the code of a block's literals; for a dynamic one from its header. */
static int codes_read(struct lane *lane, unsigned type) {
    uint8_t lengths[LITERAL_CODES_MAX + DISTANCE_CODES_MAX + 2];
    uint32_t precode[1 << PRECODE_BITS];
    unsigned literal_codes, distance_codes, precode_codes;

    if (type == BLOCK_FIXED) {
        memset(lengths, 8, 144);
        memset(lengths + 144, 9, 112);
        memset(lengths + 256, 7, 24);
        memset(lengths + 280, 8, 8);
        return code_make(&lane->code, lengths, FIXED_LITERAL_CODES);
    }
    if (!bits_take(lane, 5, &literal_codes) || !bits_take(lane, 5, &distance_codes) ||
        !bits_take(lane, 4, &precode_codes)) {
        return 0;
    }
    literal_codes += 257;
    distance_codes += 1;
    if (literal_codes > LITERAL_CODES_MAX || distance_codes > DISTANCE_CODES_MAX ||
        !precode_read(lane, precode_codes + 4, precode) ||
        !lengths_read(lane, precode, lengths, literal_codes + distance_codes)) {
        return 0;
    }
    return lengths[END_OF_BLOCK] != 0 && distances_are_valid(lengths + literal_codes, distance_codes) &&
           code_make(&lane->code, lengths, literal_codes);
}

/* block_begin() reads a block's header, or copies a stored one. */
static int block_begin(struct lane *lane, uint32_t *singles) {
    unsigned head;

    if (!bits_take(lane, 3, &head)) {
        return 0;
    }
    lane->final = head & 1;
    if (head >> 1 == BLOCK_STORED) {
        return stored_copy(lane);
    }
    if (head >> 1 > BLOCK_DYNAMIC || !codes_read(lane, head >> 1)) {
        return 0;
    }
    singles_make(&lane->code, TABLE_BITS, LITERALS, singles);
    table_make(lane->table, singles);
    lane->in_block = 1;
    return 1;
}

/* ---- One code at a time -------------------------------------------------------------------------------------- */

/* code_find() returns the length of the code that 'bits' begin with, and its symbol. */
static inline unsigned code_find(const struct code *code, uint64_t bits, unsigned *symbol) {
    uint32_t reversed = (uint32_t)bits;
    unsigned length = 1;

    reversed = (reversed & 0x5555) << 1 | (reversed >> 1 & 0x5555);
    reversed = (reversed & 0x3333) << 2 | (reversed >> 2 & 0x3333);
    reversed = (reversed & 0x0F0F) << 4 | (reversed >> 4 & 0x0F0F);
    reversed = ((reversed & 0x00FF) << 8 | reversed >> 8) >> (16 - CODE_LENGTH_MAX);
    while (reversed >= code->limits[length]) {
        length++; /* the code is complete, so the last limit is above every value */
    }
    *symbol = code->sorted[code->offsets[length] + (reversed >> (CODE_LENGTH_MAX - length))];
    return length;
}

/* symbol_decode() decodes one symbol of any length from refilled bits; returns 0 where they do not hold it. */
static int symbol_decode(struct lane *lane, unsigned *symbol) {
    unsigned length = code_find(&lane->code, lane->bits, symbol);

    if (length > lane->count) {
        return 0;
    }
    bits_drop(lane, length);
    return 1;
}

/* lane_rounds() returns how many rounds of the lockstep stay clear of the ends: 8 bytes of source, 16 of target each.
 */
static size_t lane_rounds(const struct lane *lane) {
    size_t of_source = (size_t)(lane->source_end - lane->source) / 8;
    size_t of_target = (size_t)(lane->target_end - lane->target) / 16;

    return of_source < of_target ? of_source : of_target;
}

/* lane_advance() does what the lockstep cannot, until that can go on or the stream is over. */
static enum lane_state lane_advance(struct lane *lane, uint32_t *singles) {
    for (;;) {
        unsigned symbol;

        if (!lane->in_block) {
            if (lane->final) {
                return lane->source - (lane->count >> 3) == lane->source_end && lane->target == lane->target_end
                           ? LANE_DONE
                           : LANE_FAILED;
            }
            if (!block_begin(lane, singles)) {
                return LANE_FAILED;
            }
            continue;
        }
        bits_refill(lane);
        if (lane->table[lane->bits & (TABLE_SIZE - 1)] >= ENTRY_LITERAL && lane_rounds(lane) > 0) {
            return LANE_RUNS;
        }
        if (!symbol_decode(lane, &symbol)) {
            return LANE_FAILED;
        }
        if (symbol == END_OF_BLOCK) {
            lane->in_block = 0;
        } else if (symbol > END_OF_BLOCK || lane->target == lane->target_end) {
            return LANE_FAILED;
        } else {
            *lane->target++ = (uint8_t)symbol;
        }
    }
}

/* ---- The lockstep -------------------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) void refill(const uint8_t **source, uint64_t *bits, uint64_t *count) {
    uint64_t word;

    memcpy(&word, *source, sizeof word);
    *bits |= word << *count;
    *source += (*count ^ 63) >> 3;
    *count |= REFILLED_BITS;
}

/*
 * long_literal() takes a lane over a literal whose code is longer than the index, or returns 0 where it stands at
 * something else. With the look-ups before it, that is under 63 bits and 16 bytes: no more than a round may take.
 */
static inline __attribute__((always_inline)) int long_literal(const struct code *code, const uint8_t **source,
                                                              uint64_t *bits, uint64_t *count, uint8_t **target) {
    unsigned symbol, length;

    refill(source, bits, count);
    length = code_find(code, *bits, &symbol);
    if (symbol >= LITERALS) {
        return 0;
    }
    *(*target)++ = (uint8_t)symbol;
    *bits >>= length;
    *count -= length;
    return 1;
}

/*
 * lanes_run() advances 'count' lanes until one of them is at the end of its block or 'rounds' are over. 'count' is
 * constant where this is inlined, so that the loops over it unroll and a lane's state stays in registers.
 */
static inline __attribute__((always_inline)) void lanes_run(struct lane *lanes, const unsigned count, size_t rounds) {
    const uint8_t *source[LANES];
    uint8_t *target[LANES];
    uint64_t bits[LANES], counts[LANES], used[LANES];
    uint32_t entry[LANES], least;

    for (unsigned i = 0; i < count; i++) {
        source[i] = lanes[i].source;
        target[i] = lanes[i].target;
        bits[i] = lanes[i].bits;
        counts[i] = lanes[i].count;
    }
    do {
#pragma GCC unroll 8
        for (unsigned i = 0; i < count; i++) {
            refill(&source[i], &bits[i], &counts[i]);
            used[i] = 0;
        }
#pragma GCC unroll 8
        for (unsigned lookup = 0; lookup < LOOKUPS; lookup++) {
#pragma GCC unroll 8
            for (unsigned i = 0; i < count; i++) {
                entry[i] = lanes[i].table[bits[i] & (TABLE_SIZE - 1)];
                memcpy(target[i], &entry[i], sizeof(entry[i]));
                bits[i] >>= entry[i] >> LENGTH_SHIFT & 63;
                used[i] += entry[i] >> LENGTH_SHIFT;
                __asm__("" : "+r"(used[i])); /* or the sums wait for the end of the round, on the stack */
                target[i] += entry[i] >> COUNT_SHIFT;
            }
        }
        least = UINT32_MAX;
#pragma GCC unroll 8
        for (unsigned i = 0; i < count; i++) {
            counts[i] -= used[i] & 63; /* what is above are numbers of literals */
            least = entry[i] < least ? entry[i] : least;
        }
        if (__builtin_expect(least < ENTRY_LITERAL, 0) && rounds > 1) {
            least = ENTRY_LITERAL;
            for (unsigned i = 0; i < count; i++) {
                if (entry[i] < ENTRY_LITERAL &&
                    !long_literal(&lanes[i].code, &source[i], &bits[i], &counts[i], &target[i])) {
                    least = 0;
                }
            }
        }
    } while (least >= ENTRY_LITERAL && --rounds > 0);
    for (unsigned i = 0; i < count; i++) {
        lanes[i].source = source[i];
        lanes[i].target = target[i];
        lanes[i].bits = bits[i];
        lanes[i].count = counts[i];
    }
}

/* The lockstep of each number of lanes, for any CPU and for those whose shifts need no flags. */
static inline __attribute__((always_inline)) void lanes_run_any(struct lane *lanes, unsigned count, size_t rounds) {
    switch (count) {
    case 1:
        lanes_run(lanes, 1, rounds);
        break;
    case 2:
        lanes_run(lanes, 2, rounds);
        break;
    default:
        lanes_run(lanes, LANES, rounds);
    }
}

static void lanes_run_portable(struct lane *lanes, unsigned count, size_t rounds) {
    lanes_run_any(lanes, count, rounds);
}

#ifdef SS_ARCH_X86_64
__attribute__((target("bmi,bmi2"))) static void lanes_run_bmi2(struct lane *lanes, unsigned count, size_t rounds) {
    lanes_run_any(lanes, count, rounds);
}
#endif

typedef void lanes_run_function(struct lane *lanes, unsigned count, size_t rounds);

/* With the vector kernels forced to portable C, this is portable C, too. */
static lanes_run_function *lanes_run_choose(void) {
#ifdef SS_ARCH_X86_64
    if (ss_isa_active() != SS_ISA_SCALAR && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) {
        return lanes_run_bmi2;
    }
#endif
    return lanes_run_portable;
}

/* ---- Streams ------------------------------------------------------------------------------------------------- */

struct ss_literal_inflater *ss_literal_inflater_create(void) {
    return malloc(sizeof(struct ss_literal_inflater));
}

static void lane_begin(struct lane *lane, struct ss_stream *stream) {
    lane->stream = stream;
    lane->source = stream->source;
    lane->source_end = lane->source + stream->source_size;
    lane->target = stream->target;
    lane->target_end = lane->target + stream->target_size;
    lane->bits = 0;
    lane->count = 0;
    lane->in_block = 0;
    lane->final = 0;
}

void ss_literal_inflate(struct ss_literal_inflater *inflater, struct ss_stream *streams, size_t count) {
    lanes_run_function *run = lanes_run_choose();
    struct lane *lanes = inflater->lanes;
    unsigned busy = 0;

    while (busy > 0 || count > 0) {
        size_t rounds = SIZE_MAX;

        while (busy < LANES && count > 0) {
            if (streams->result == SS_NOT_SUPPORTED) {
                lane_begin(&lanes[busy++], streams);
            }
            streams++;
            count--;
        }
        for (unsigned index = 0; index < busy;) {
            struct lane *lane = &lanes[index];
            enum lane_state state = lane_advance(lane, inflater->singles);

            if (state == LANE_RUNS) {
                size_t of_lane = lane_rounds(lane);
                rounds = of_lane < rounds ? of_lane : rounds;
                index++;
                continue;
            }
            if (state == LANE_DONE) {
                lane->stream->result = SS_OK;
            }
            if (--busy != index) {
                memcpy(lane, &lanes[busy], sizeof *lane);
            }
        }
        /* A lane that just became free gets its next stream first. */
        if (busy > 0 && (busy == LANES || count == 0)) {
            run(lanes, busy, rounds);
        }
    }
}
