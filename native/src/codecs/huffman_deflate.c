/* SPDX-License-Identifier: Apache-2.0 */
/*
 * huffman_deflate.c - Deflate without matches
 *
 * Quantized KV is near order-0 noise: a match search costs most of the encoding time and makes streams larger and
 * slower to decode (every match ends a run of literals that a multi-symbol table could have decoded at once). So each
 * block codes its bytes as literals with a Huffman code of its own, or is stored where that gains next to nothing.
 *
 *   block = header (RFC 1951 section 3.2.7) + one code for each byte + end of block
 *
 * Choices, and why:
 * - Blocks of at most 128 KiB: each header costs about 60 bytes and each block costs a decoder a table. Smaller blocks
 *   follow the data's changes better, which within one kind of data gains less than that.
 * - But a block ends, after a multiple of 16 KiB, where the next piece is better off with a code of its own: a slice of
 *   lossless KV is byte planes one behind the other, and exponents in one block with mantissas lose a tenth in size,
 *   while the mantissas, which nothing can compress, lose the memcpy that they could be decoded with.
 * - CODE_LENGTH_MAX 12 of the 15 allowed: ISA-L's first table looks at 12 bits, so no code needs its second one, and
 *   four codes and a started byte (4 * 12 + 7 bits) fit the 64-bit accumulator. It costs under 0.03 % of size.
 * - Two distance codes of one bit each, though none is used: the RFC allows "no distance codes", but zlib never
 *   writes that, and an incomplete code is what a strict hardware decoder would stumble over.
 * - Stored where the gain is under 1 %: decoding them is a memcpy.
 *
 * The cost of a block is known to the bit before it is written, so the space check is one comparison for each block.
 */
#include "codecs/huffman_deflate.h"

#include <math.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the C core supports little-endian machines only"
#endif

enum {
    BLOCK_SIZE = 128 * 1024,
    PIECE_SIZE = BLOCK_SIZE / 8,
    SPLIT_GAIN_BITS = 2048, /* what another block costs: its header, and what a decoder could do instead of its table */
    CODE_LENGTH_MAX = 12,
    STORED_SIZE_MAX = 65535,
    END_OF_BLOCK = 256,
    LITERAL_CODES = 257,
    DISTANCE_CODES = 2,
    ALL_CODES = LITERAL_CODES + DISTANCE_CODES,
    PRECODE_CODES = 19,
    PRECODE_LENGTH_MAX = 7,
    REPEAT_PREVIOUS = 16,
    REPEAT_ZERO_SHORT = 17,
    REPEAT_ZERO_LONG = 18,
    BLOCK_STORED = 0,
    BLOCK_FIXED = 1,
    BLOCK_DYNAMIC = 2,
    SORT_BITS = 9,
};

_Static_assert(BLOCK_SIZE + 1 < 1 << (2 * SORT_BITS), "two radix passes must cover every frequency");
_Static_assert(4 * CODE_LENGTH_MAX + 7 <= 64, "four codes and a started byte must fit the accumulator");

/* The order in which the header lists the precode's lengths (RFC 1951 section 3.2.7). */
static const uint8_t precode_order[PRECODE_CODES] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
static const uint8_t precode_extra_bits[PRECODE_CODES] = {
    [REPEAT_PREVIOUS] = 2, [REPEAT_ZERO_SHORT] = 3, [REPEAT_ZERO_LONG] = 7};

struct bit_writer {
    uint8_t *next;
    uint8_t *end;
    uint64_t bits;  /* not yet written, lowest first */
    unsigned count; /* of them; under 8 between calls */
};

/* Everything about one dynamic block that is known before it is written. */
struct block {
    uint8_t lengths[ALL_CODES];     /* literals, end of block, distances */
    uint32_t codes[LITERAL_CODES];  /* bit-reversed code, and its length << 16 */
    uint8_t items[ALL_CODES];       /* 'lengths' as precode symbols */
    uint8_t items_extra[ALL_CODES]; /* and the values of their extra bits */
    unsigned item_count;
    uint8_t precode_lengths[PRECODE_CODES];
    unsigned precode_count; /* how many of precode_order are listed */
    uint64_t cost_bits;     /* of the whole block */
};

/* ---- Code construction --------------------------------------------------------------------------------------- */

/*
 * symbols_sort() writes the symbols of nonzero frequency to 'sorted', the rarest first, equal ones by symbol, and
 * returns their number.
 */
static unsigned symbols_sort(const uint32_t *frequencies, unsigned symbol_count, uint16_t *sorted) {
    enum { BUCKETS = 1 << SORT_BITS };
    uint16_t first_pass[LITERAL_CODES];
    unsigned used = 0;

    for (unsigned symbol = 0; symbol < symbol_count; symbol++) {
        if (frequencies[symbol] != 0) {
            first_pass[used++] = (uint16_t)symbol;
        }
    }
    for (unsigned pass = 0; pass < 2; pass++) {
        const uint16_t *from = pass == 0 ? first_pass : sorted;
        uint16_t *to = pass == 0 ? sorted : first_pass;
        uint16_t starts[BUCKETS] = {0};
        uint16_t position = 0;

        for (unsigned index = 0; index < used; index++) {
            starts[frequencies[from[index]] >> (pass * SORT_BITS) & (BUCKETS - 1)]++;
        }
        for (unsigned bucket = 0; bucket < BUCKETS; bucket++) {
            uint16_t size = starts[bucket];
            starts[bucket] = position;
            position = (uint16_t)(position + size);
        }
        for (unsigned index = 0; index < used; index++) {
            to[starts[frequencies[from[index]] >> (pass * SORT_BITS) & (BUCKETS - 1)]++] = from[index];
        }
    }
    memcpy(sorted, first_pass, used * sizeof *sorted);
    return used;
}

/*
 * lengths_count() builds the Huffman tree over 'used' >= 2 sorted symbols and counts its leaves by depth, with depths
 * over 'length_max' counted as 'length_max'. Leaves and inner nodes both come in ascending order of weight, so two
 * queues do (van Leeuwen).
 */
static void lengths_count(const uint32_t *frequencies, const uint16_t *sorted, unsigned used, unsigned length_max,
                          unsigned *counts) {
    uint32_t weights[LITERAL_CODES]; /* of inner nodes */
    uint16_t leaf_parents[LITERAL_CODES];
    uint16_t node_parents[LITERAL_CODES];
    uint16_t depths[LITERAL_CODES]; /* of inner nodes */
    unsigned leaf = 0, node = 0;

    for (unsigned made = 0; made + 1 < used; made++) {
        uint32_t weight = 0;
        for (unsigned child = 0; child < 2; child++) {
            if (node == made || (leaf < used && frequencies[sorted[leaf]] <= weights[node])) {
                weight += frequencies[sorted[leaf]];
                leaf_parents[leaf++] = (uint16_t)made;
            } else {
                weight += weights[node];
                node_parents[node++] = (uint16_t)made;
            }
        }
        weights[made] = weight;
    }
    depths[used - 2] = 0;
    for (unsigned index = used - 2; index-- > 0;) {
        depths[index] = (uint16_t)(depths[node_parents[index]] + 1);
    }
    for (unsigned index = 0; index < used; index++) {
        unsigned depth = depths[leaf_parents[index]] + 1u;
        counts[depth < length_max ? depth : length_max]++;
    }
}

/*
 * counts_limit() makes a complete code of counts whose deepest leaves were cut to 'length_max'. Each step turns the
 * deepest shorter leaf into an inner node, with that leaf and one from 'length_max' below it, which frees one code of
 * 'length_max' (as zlib does).
 */
static void counts_limit(unsigned *counts, unsigned length_max) {
    uint32_t taken = 0;

    for (unsigned length = 1; length <= length_max; length++) {
        taken += (uint32_t)counts[length] << (length_max - length);
    }
    for (; taken > 1u << length_max; taken--) {
        unsigned length = length_max - 1;
        while (counts[length] == 0) {
            length--;
        }
        counts[length]--;
        counts[length + 1] += 2;
        counts[length_max]--;
    }
}

/*
 * code_lengths_build() gives each symbol the length of its code in a complete, length-limited Huffman code; 0 where
 * the frequency is 0. At least two frequencies are not.
 */
static void code_lengths_build(const uint32_t *frequencies, unsigned symbol_count, unsigned length_max,
                               uint8_t *lengths) {
    uint16_t sorted[LITERAL_CODES];
    unsigned counts[16] = {0};
    unsigned used = symbols_sort(frequencies, symbol_count, sorted);
    unsigned index = 0;

    lengths_count(frequencies, sorted, used, length_max, counts);
    counts_limit(counts, length_max);
    memset(lengths, 0, symbol_count);
    for (unsigned length = length_max; length > 0; length--) {
        for (unsigned count = counts[length]; count > 0; count--) {
            lengths[sorted[index++]] = (uint8_t)length;
        }
    }
}

/* codes_build() makes the canonical codes of RFC 1951 section 3.2.2, bit-reversed, with their length << 16. */
static void codes_build(const uint8_t *lengths, unsigned symbol_count, uint32_t *codes) {
    uint32_t next[17] = {0};
    unsigned counts[16] = {0};

    for (unsigned symbol = 0; symbol < symbol_count; symbol++) {
        counts[lengths[symbol]]++;
    }
    counts[0] = 0;
    for (unsigned length = 0; length < 16; length++) {
        next[length + 1] = (next[length] + counts[length]) << 1;
    }
    for (unsigned symbol = 0; symbol < symbol_count; symbol++) {
        unsigned length = lengths[symbol];
        uint32_t code = length != 0 ? next[length]++ : 0;
        uint32_t reversed = 0;

        for (unsigned bit = 0; bit < length; bit++) {
            reversed |= (code >> bit & 1) << (length - 1 - bit);
        }
        codes[symbol] = reversed | (uint32_t)length << 16;
    }
}

/* ---- Planning a block ---------------------------------------------------------------------------------------- */

/* histogram_count() uses four tables, so that equal neighbours do not wait for each other's increments. */
static void histogram_count(const uint8_t *source, size_t size, uint32_t *frequencies) {
    uint32_t tables[4][256] = {{0}};
    size_t index = 0;

    for (; index + 8 <= size; index += 8) {
        uint64_t word;
        memcpy(&word, source + index, sizeof word);
        tables[0][word & 0xFF]++;
        tables[1][word >> 8 & 0xFF]++;
        tables[2][word >> 16 & 0xFF]++;
        tables[3][word >> 24 & 0xFF]++;
        tables[0][word >> 32 & 0xFF]++;
        tables[1][word >> 40 & 0xFF]++;
        tables[2][word >> 48 & 0xFF]++;
        tables[3][word >> 56]++;
    }
    for (; index < size; index++) {
        tables[0][source[index]]++;
    }
    for (unsigned literal = 0; literal < 256; literal++) {
        frequencies[literal] = tables[0][literal] + tables[1][literal] + tables[2][literal] + tables[3][literal];
    }
}

static void item_add(struct block *block, uint32_t *frequencies, unsigned symbol, unsigned extra) {
    block->items[block->item_count] = (uint8_t)symbol;
    block->items_extra[block->item_count] = (uint8_t)extra;
    block->item_count++;
    frequencies[symbol]++;
}

/* lengths_run_encode() turns the code lengths into precode symbols: lengths, and repeats of them. */
static void lengths_run_encode(struct block *block, uint32_t *frequencies) {
    for (unsigned index = 0; index < ALL_CODES;) {
        unsigned length = block->lengths[index];
        unsigned run = 1;

        while (index + run < ALL_CODES && block->lengths[index + run] == length) {
            run++;
        }
        index += run;
        if (length != 0) {
            item_add(block, frequencies, length, 0);
            run--;
        }
        while (run >= 3) {
            unsigned most = length != 0 ? 6 : 138;
            unsigned take = run < most ? run : most;

            if (length != 0) {
                item_add(block, frequencies, REPEAT_PREVIOUS, take - 3);
            } else if (take <= 10) {
                item_add(block, frequencies, REPEAT_ZERO_SHORT, take - 3);
            } else {
                item_add(block, frequencies, REPEAT_ZERO_LONG, take - 11);
            }
            run -= take;
        }
        for (; run > 0; run--) {
            item_add(block, frequencies, length, 0);
        }
    }
}

/* entropy_bits() estimates what 'total' bytes of these frequencies take, coded by themselves or stored. */
static float entropy_bits(const uint32_t *frequencies, size_t total) {
    float bits = (float)total * log2f((float)total);

    for (unsigned literal = 0; literal < 256; literal++) {
        if (frequencies[literal] != 0) {
            bits -= (float)frequencies[literal] * log2f((float)frequencies[literal]);
        }
    }
    return bits < 8 * (float)total ? bits : 8 * (float)total;
}

/*
 * block_measure() decides where the block that begins at 'source' ends, and returns its length; 'frequencies' gets its
 * histogram. It grows piece by piece while sharing one code costs less than another block.
 */
static size_t block_measure(const uint8_t *source, size_t size, uint32_t *frequencies) {
    size_t length = size < PIECE_SIZE ? size : PIECE_SIZE;
    float cost;

    histogram_count(source, length, frequencies);
    cost = entropy_bits(frequencies, length);
    while (length < size && length + PIECE_SIZE <= BLOCK_SIZE) {
        size_t piece = size - length < PIECE_SIZE ? size - length : PIECE_SIZE;
        uint32_t joined[256];
        float piece_cost, joined_cost;

        histogram_count(source + length, piece, joined);
        piece_cost = entropy_bits(joined, piece);
        for (unsigned literal = 0; literal < 256; literal++) {
            joined[literal] += frequencies[literal];
        }
        joined_cost = entropy_bits(joined, length + piece);
        if (joined_cost > cost + piece_cost + SPLIT_GAIN_BITS) {
            break;
        }
        memcpy(frequencies, joined, sizeof joined);
        cost = joined_cost;
        length += piece;
    }
    return length;
}

/* block_plan() makes the code for a block of these 'frequencies', to which it adds the end of the block. */
static void block_plan(struct block *block, uint32_t *frequencies) {
    uint32_t precode_frequencies[PRECODE_CODES] = {0};

    frequencies[END_OF_BLOCK] = 1;
    code_lengths_build(frequencies, LITERAL_CODES, CODE_LENGTH_MAX, block->lengths);
    memset(block->lengths + LITERAL_CODES, 1, DISTANCE_CODES);

    block->item_count = 0;
    lengths_run_encode(block, precode_frequencies);
    code_lengths_build(precode_frequencies, PRECODE_CODES, PRECODE_LENGTH_MAX, block->precode_lengths);
    block->precode_count = PRECODE_CODES;
    while (block->precode_lengths[precode_order[block->precode_count - 1]] == 0) {
        block->precode_count--;
    }

    block->cost_bits = 3 + 5 + 5 + 4 + 3 * block->precode_count;
    for (unsigned symbol = 0; symbol < PRECODE_CODES; symbol++) {
        block->cost_bits +=
            (uint64_t)precode_frequencies[symbol] * (block->precode_lengths[symbol] + precode_extra_bits[symbol]);
    }
    for (unsigned symbol = 0; symbol < LITERAL_CODES; symbol++) {
        block->cost_bits += (uint64_t)frequencies[symbol] * block->lengths[symbol];
    }
}

/* ---- Writing ------------------------------------------------------------------------------------------------- */

static void bytes_flush(struct bit_writer *writer) {
    for (; writer->count >= 8; writer->count -= 8) {
        *writer->next++ = (uint8_t)writer->bits;
        writer->bits >>= 8;
    }
}

/* bits_put() appends up to 32 bits. */
static void bits_put(struct bit_writer *writer, uint32_t value, unsigned count) {
    writer->bits |= (uint64_t)value << writer->count;
    writer->count += count;
    bytes_flush(writer);
}

static void bits_align(struct bit_writer *writer) {
    writer->count = (writer->count + 7) & ~7u;
    bytes_flush(writer);
}

/* header_put() writes a dynamic block's header. */
static void header_put(struct bit_writer *writer, const struct block *block, unsigned final) {
    uint32_t precodes[PRECODE_CODES];

    codes_build(block->precode_lengths, PRECODE_CODES, precodes);
    bits_put(writer, final | BLOCK_DYNAMIC << 1, 3);
    bits_put(writer, LITERAL_CODES - 257, 5);
    bits_put(writer, DISTANCE_CODES - 1, 5);
    bits_put(writer, block->precode_count - 4, 4);
    for (unsigned index = 0; index < block->precode_count; index++) {
        bits_put(writer, block->precode_lengths[precode_order[index]], 3);
    }
    for (unsigned index = 0; index < block->item_count; index++) {
        uint32_t precode = precodes[block->items[index]];
        bits_put(writer, precode & 0xFFFF, precode >> 16);
        bits_put(writer, block->items_extra[index], precode_extra_bits[block->items[index]]);
    }
}

/*
 * literals_put_fast() appends as many literals as it can in groups of eight, and returns how many. It stores eight
 * bytes at a time, so the space must go on for eight bytes after the last bit. Codes are joined pairwise first: the
 * accumulator then waits for one shift every four literals.
 */
static size_t literals_put_fast(struct bit_writer *writer, const uint32_t *codes, const uint8_t *source, size_t size) {
    uint8_t *next = writer->next;
    uint64_t bits = writer->bits;
    unsigned count = writer->count;
    size_t index = 0;

    for (; index + 8 <= size; index += 8) {
        uint64_t word;
        memcpy(&word, source + index, sizeof word);
        for (unsigned half = 0; half < 2; half++, word >>= 32) {
            uint32_t a = codes[word & 0xFF], b = codes[word >> 8 & 0xFF];
            uint32_t c = codes[word >> 16 & 0xFF], d = codes[word >> 24 & 0xFF];
            unsigned ab_count = (a >> 16) + (b >> 16), cd_count = (c >> 16) + (d >> 16);
            uint64_t ab = (a & 0xFFFF) | (uint64_t)(b & 0xFFFF) << (a >> 16);
            uint64_t cd = (c & 0xFFFF) | (uint64_t)(d & 0xFFFF) << (c >> 16);

            bits |= (ab | cd << ab_count) << count;
            count += ab_count + cd_count;
            memcpy(next, &bits, sizeof bits);
            next += count >> 3;
            bits >>= count & ~7u;
            count &= 7;
        }
    }
    writer->next = next;
    writer->bits = bits;
    writer->count = count;
    return index;
}

static enum ss_result dynamic_put(struct bit_writer *writer, struct block *block, const uint8_t *source, size_t size,
                                  unsigned final) {
    uint64_t needed = (writer->count + block->cost_bits + 7) / 8;
    uint64_t space = (uint64_t)(writer->end - writer->next);
    size_t index = 0;

    if (needed > space) {
        return SS_NO_SPACE;
    }
    codes_build(block->lengths, LITERAL_CODES, block->codes);
    header_put(writer, block, final);
    if (needed + sizeof(uint64_t) <= space) {
        index = literals_put_fast(writer, block->codes, source, size);
    }
    for (; index < size; index++) {
        bits_put(writer, block->codes[source[index]] & 0xFFFF, block->codes[source[index]] >> 16);
    }
    bits_put(writer, block->codes[END_OF_BLOCK] & 0xFFFF, block->codes[END_OF_BLOCK] >> 16);
    return SS_OK;
}

static enum ss_result stored_put(struct bit_writer *writer, const uint8_t *source, size_t size, unsigned final) {
    while (size > 0) {
        size_t piece = size < STORED_SIZE_MAX ? size : STORED_SIZE_MAX;
        size_t needed = (writer->count + 3 + 7) / 8 + 4 + piece;

        if (needed > (size_t)(writer->end - writer->next)) {
            return SS_NO_SPACE;
        }
        bits_put(writer, (final && piece == size) | BLOCK_STORED << 1, 3);
        bits_align(writer);
        bits_put(writer, (uint32_t)piece | (uint32_t)(piece ^ 0xFFFF) << 16, 32);
        memcpy(writer->next, source, piece);
        writer->next += piece;
        source += piece;
        size -= piece;
    }
    return SS_OK;
}

/* ---- The encoder --------------------------------------------------------------------------------------------- */

size_t ss_huffman_deflate_bound(size_t size) {
    /*
     * A dynamic block is only written where it is smaller than a stored one, so stored blocks are the worst case: at
     * most 42 bits more than their bytes each, one for each STORED_SIZE_MAX bytes, and one for the end of each run of
     * blocks that are stored. Eight more let the fast path run to the end.
     */
    return size + 6 * (size / STORED_SIZE_MAX + size / PIECE_SIZE + 2) + sizeof(uint64_t);
}

enum ss_result ss_huffman_deflate(const uint8_t *source, size_t size, uint8_t *target, size_t target_size,
                                  size_t *written) {
    struct bit_writer writer = {.next = target, .end = target + target_size, .bits = 0, .count = 0};
    struct block block;
    enum ss_result result = SS_OK;
    size_t stored_start = 0; /* source[stored_start .. position) is to be stored, but not written yet */
    size_t position = 0;

    if (size == 0) { /* one fixed block that holds its end alone: ten bits */
        if (target_size < 2) {
            return SS_NO_SPACE;
        }
        bits_put(&writer, 1 | BLOCK_FIXED << 1, 3);
        bits_put(&writer, 0, 7);
    }
    while (position < size && result == SS_OK) {
        uint32_t frequencies[LITERAL_CODES];
        size_t length = block_measure(source + position, size - position, frequencies);

        block_plan(&block, frequencies);
        if (block.cost_bits <= (uint64_t)length * 8 / 100 * 99) {
            result = stored_put(&writer, source + stored_start, position - stored_start, 0);
            if (result == SS_OK) {
                result = dynamic_put(&writer, &block, source + position, length, position + length == size);
            }
            stored_start = position + length;
        }
        position += length;
    }
    if (result == SS_OK) {
        result = stored_put(&writer, source + stored_start, size - stored_start, 1);
    }
    if (result != SS_OK) {
        return result;
    }
    bits_align(&writer);
    *written = (size_t)(writer.next - target);
    return SS_OK;
}
