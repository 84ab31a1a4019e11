/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvrans.h - what the parts of the codec kvrans share
 *
 * docs/design/kvrans.md is the format. kvrans.c reads streams: it checks everything but the coded bytes and hands whole
 * blocks to a kernel. encode.c plans blocks and writes streams. The kernels (scalar.c, avx512.c and so
 * on) know nothing of streams, and every variant reads and writes the same bytes.
 */
#ifndef SS_KVRANS_H
#define SS_KVRANS_H

#include <stddef.h>
#include <stdint.h>

#include "cpu/cpu.h"
#include "quantize/weighted.h"
#include "shadowserve.h"

enum {
    SS_KVRANS_VERSION = 1,
    SS_KVRANS_STREAM_HEADER = 4, /* bytes: version, row length in three bytes */
    SS_KVRANS_ROW_MAX = 65536,   /* bytes of a row, that is, columns */
    SS_KVRANS_ROWS_MAX = 256,    /* rows of a block */
    SS_KVRANS_GROUP = 64,        /* rows that a 64-byte register holds: lanes come in groups of these */
    SS_KVRANS_LANES_MAX = 256,
    SS_KVRANS_INDEX_MAX = 64, /* symbols of a block's alphabet */
    SS_KVRANS_TABLES_MAX = 16,
    SS_KVRANS_WIDTH_MAX = 128, /* columns of a head that decode_weighted() takes */
    SS_KVRANS_SHIFT_MAX = 3,
    SS_KVRANS_PART_ENOUGH = 320, /* columns by which the encoder finds which kinds there are */
    SS_KVRANS_PART_MAX = 2 * SS_KVRANS_PART_ENOUGH,
    SS_KVRANS_SLOTS = 256,       /* frequencies sum to this */
    SS_KVRANS_STATE_FIRST = 256, /* every lane's state before the encoder's first and after the decoder's last row */
    SS_KVRANS_STORED = 0,        /* block types */
    SS_KVRANS_CODED = 1,
    SS_KVRANS_STORED_HEADER = 2, /* bytes: type, rows - 1 */
    SS_KVRANS_CODED_HEADER = 8,  /* bytes: type, rows - 1, layout, alphabet, length of what follows in four bytes */
    SS_KVRANS_ALPHABET_LISTED = 0x80, /* the alphabet's values are listed, not a range */
};

/* ---- Decoding ------------------------------------------------------------------------------------------------ */

/* One table: what a slot, the low byte of a state, says. Each member fills whole 64-byte registers. */
struct ss_kvrans_table {
    _Alignas(64) uint8_t index[SS_KVRANS_SLOTS]; /* of the symbol that has this slot; all under 64 */
    uint8_t frequency[SS_KVRANS_INDEX_MAX];      /* slots of the symbol with this index */
    uint8_t start[SS_KVRANS_INDEX_MAX];          /* its first slot; of no meaning where the frequency is 0 */
};

/* A block that was parsed and checked: everything in it can be relied on, but for what the coded bytes decode to. */
struct ss_kvrans_block {
    _Alignas(64)
        uint8_t value[SS_KVRANS_INDEX_MAX]; /* byte of each index, its 'shift' low bits 0; a range goes on to the end */
    const struct ss_kvrans_table *tables;
    const uint8_t *column_table; /* for each column, its table's number */
    const uint8_t *planes;       /* the low bits: for each column, bit 0 then bit 1, ceil(rows / 8) bytes each */
    const uint8_t *states_low;   /* low bytes of the first states, one for each of the first min(rows, lanes) rows */
    const uint8_t *states_high;  /* their high bytes, none of them 0 */
    const uint8_t *coded;
    size_t coded_size;
    uint32_t rows;    /* 1 to 256 */
    uint32_t columns; /* 1 to 65536 */
    uint32_t lanes;   /* 64, 128 or 256; row r uses state r % lanes */
    uint32_t shift;   /* 0 to 3 low bits of each byte are in 'planes' */
    uint32_t count;   /* symbols of the alphabet, 1 to 64 */

    /* What this thread reads once the block is decoded, to be asked for meanwhile: any bytes, perhaps none. */
    const uint8_t *next;
    size_t next_size;
};

/*
 * The elements of a block's symbols: for each row, the lower and the upper byte of what each entry stands for, which is
 * an index with its low bits behind it (see ss_kvrans_entries()). The scratch of ss_kvrans_kernels.decode_elements(),
 * which fills it; not always as wide as this, see ss_kvrans_making.
 */
struct ss_kvrans_elements {
    _Alignas(64) uint8_t bytes[SS_KVRANS_ROWS_MAX][2][SS_KVRANS_INDEX_MAX];
};

/* Where the planes behind the first one are, the most significant first: of the block's rows, one behind the other. */
struct ss_kvrans_planes {
    const uint8_t *lower[3];
    uint32_t count; /* of all planes, so bytes of an element: 1, 2 or 4 */
};

/* What rows of symbols become: binned elements, of entries, lossless ones, of the bytes of a first plane, or neither.
 */
struct ss_kvrans_making {
    const struct ss_kvrans_elements *elements; /* of all rows; NULL unless binned */
    struct ss_kvrans_planes planes;            /* lossless only, or 'count' is 0 */
    struct ss_kvrans_tiles *tiles;             /* with AVX-512 only */
    uint8_t *target;                           /* of the block, its first row */
    size_t rows;                               /* of the block; with AVX-512 only */
    size_t columns;
    uint32_t size;       /* of an element, in bytes */
    uint32_t table_size; /* of binned, but with AVX-512: entries that each row has in 'elements', close together */
};

enum { SS_KVRANS_STRIP = 16 };

/* What decoding with AVX-512 turns from columns to rows: a strip of columns at a time, and a tile of them. */
struct ss_kvrans_tiles {
    _Alignas(64) uint8_t strips[2][SS_KVRANS_STRIP * SS_KVRANS_ROWS_MAX]; /* as decoded */
    struct ss_kvrans_tile {
        _Alignas(64) uint8_t turned[SS_KVRANS_GROUP * SS_KVRANS_ROWS_MAX];
        struct ss_kvrans_making making; /* without rows: there is no tile */
        size_t first;                   /* of the block's columns */
    } pair[2];                          /* one is decoded while the other one is written */
    uint32_t now;                       /* which one is decoded */
};

/* Cosines and sines of each SS_TURNS-th row of a block, and of as many turns as there are between. */
enum { SS_KVRANS_ANGLES = (SS_KVRANS_ROWS_MAX / SS_TURNS + SS_TURNS) * SS_KVRANS_WIDTH_MAX };

/* What rows become elements of 'weighted' with. */
struct ss_kvrans_weighted {
    const struct ss_weighted *slice;
    const struct ss_elements *elements; /* of 16 bits; of the slice */
    float *angles;                      /* room for SS_KVRANS_ANGLES of them, aligned to 64 bytes */
    size_t vector;                      /* of the slice: the block's first row */
    uint32_t width;                     /* columns that are whole heads: SS_KVRANS_GROUP or SS_KVRANS_WIDTH_MAX */
};

/* ---- Encoding ------------------------------------------------------------------------------------------------ */

/*
 * What the encoder needs of a table, by index. 'reciprocal' is floor(65536 / frequency), 65535 where that is 1, so that
 * (state * reciprocal) >> 16 is state / frequency or one less for every 16-bit state.
 */
struct ss_kvrans_encode_table {
    _Alignas(64) uint8_t frequency[SS_KVRANS_INDEX_MAX];
    uint8_t start[SS_KVRANS_INDEX_MAX];
    uint8_t reciprocal_low[SS_KVRANS_INDEX_MAX];
    uint8_t reciprocal_high[SS_KVRANS_INDEX_MAX];
};

/* Conversion of a block's bytes to indices. */
struct ss_kvrans_alphabet {
    _Alignas(64) uint8_t index[256];    /* of each (byte >> shift); 0 where there is none */
    uint8_t value[SS_KVRANS_INDEX_MAX]; /* (byte >> shift) of each index */
    uint32_t count;                     /* 2 to 64 */
    uint32_t shift;
    uint32_t listed; /* 0: value[i] is value[0] + i, modulo 256 >> shift */
};

/* The extremes of a block's bytes, as unsigned and as signed numbers. */
struct ss_kvrans_extremes {
    uint8_t least, most;
    int8_t signed_least, signed_most;
};

/*
 * A block that is being encoded. Bytes, later indices, are stored column by column, SS_KVRANS_ROWS_MAX apart for any
 * 'rows'; the bytes behind a column's last row are undefined, but may be read and written.
 */
struct ss_kvrans_plan {
    struct ss_kvrans_encode_table tables[SS_KVRANS_TABLES_MAX];
    uint8_t *cells;              /* columns * SS_KVRANS_ROWS_MAX */
    uint8_t *cells_scratch;      /* one byte for each column, for temporary use */
    uint16_t *counts;            /* columns * SS_KVRANS_INDEX_MAX: how often each index is in each column */
    uint16_t *counts_of_part;    /* room for those of SS_KVRANS_PART_MAX columns */
    const uint8_t *column_table; /* for each column, its table's number */
    uint32_t rows;
    uint32_t columns;
    uint32_t lanes;
};

/*
 * What coding an index with each table costs, in 1/256 bits, at most 0x3FFF: indices in pairs, so that one multiply-add
 * of 16-bit numbers takes two of them for one table.
 */
struct ss_kvrans_costs {
    _Alignas(64) int16_t cost[SS_KVRANS_INDEX_MAX / 2][SS_KVRANS_TABLES_MAX][2];
};

/* Bytes that an encoding kernel may write before the first coded byte. */
enum { SS_KVRANS_ENCODE_SLACK = 64 };

/* ---- Kernels ------------------------------------------------------------------------------------------------- */

struct ss_kvrans_kernels {
    const char *name;

    /*
     * decode() writes rows * columns bytes, row by row, to 'target'. SS_BAD_DATA where the coded bytes do not end with
     * the last row, or some state is then not SS_KVRANS_STATE_FIRST; the target is then left in any state. Never reads
     * outside the block's sections.
     */
    enum ss_result (*decode)(const struct ss_kvrans_block *block, uint8_t *target);

    /*
     * decode_elements() is decode() and then ss_dequantize(), a row with the scale at 'scales', to elements of 'dtype'.
     * For blocks of ss_kvrans_elements_fit() and ss_kvrans_entries_fit() only. NULL where it would gain nothing. The
     * caller orders its stores (ss_streams_order()).
     */
    enum ss_result (*decode_elements)(const struct ss_kvrans_block *block, enum ss_dtype dtype, const float *scales,
                                      struct ss_kvrans_elements *scratch, uint8_t *target);

    /*
     * decode_planes() is decode() and then ss_dequantize() of lossless elements, of which the block is the first plane.
     * For blocks of ss_kvrans_elements_fit() only. NULL where it would gain nothing. The caller orders its stores.
     *
     * With tiles_write(), it leaves the last columns in 'tiles': to tiles_write(), or to the next decode_planes(),
     * which writes them even if it fails. Until then planes and target must stay. At first, all bytes of 'tiles' are 0.
     */
    enum ss_result (*decode_planes)(const struct ss_kvrans_block *block, const struct ss_kvrans_planes *planes,
                                    struct ss_kvrans_tiles *tiles, uint8_t *target);
    void (*tiles_write)(struct ss_kvrans_tiles *tiles); /* or NULL */

    /*
     * decode_weighted() is decode() and then ss_unweigh() of the block's rows. For blocks of ss_kvrans_elements_fit()
     * only, whose first row is a base (a multiple of SS_TURNS). NULL where it would gain nothing. The caller orders its
     * stores.
     */
    enum ss_result (*decode_weighted)(const struct ss_kvrans_block *block, const struct ss_kvrans_weighted *weighted);

    /* transpose() fills 'cells' from rows * columns bytes at 'source' and finds their extremes. */
    void (*transpose)(const struct ss_kvrans_plan *plan, const uint8_t *source, struct ss_kvrans_extremes *extremes);

    /* present() sets seen[b] to 1 for each byte b among 'size' of them; the other ones of 256 it leaves alone. */
    void (*present)(const uint8_t *source, size_t size, uint8_t *seen);

    /*
     * count() fills 'counts' from the bytes in 'cells': how often each column has each index of the alphabet, which has
     * all of them. Behind those are zeros up to a multiple of 16.
     */
    void (*count)(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet);

    /* map() turns the bytes in 'cells' into indices, and writes the low bits to 'planes' (see ss_kvrans_block). */
    void (*map)(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet, uint8_t *planes);

    /* total() adds the counts of each column to those of its table. */
    void (*total)(const struct ss_kvrans_plan *plan, const uint8_t *column_table, uint32_t index_count,
                  uint32_t (*totals)[SS_KVRANS_INDEX_MAX]);

    /*
     * assign() finds for each column the table with which its counts cost least, the first of several, and writes its
     * number to 'column_table'.
     */
    void (*assign)(const struct ss_kvrans_plan *plan, const struct ss_kvrans_costs *costs, uint32_t index_count,
                   uint8_t *column_table);

    /*
     * encode() writes coded bytes backwards so that they end right before 'end', and the states that the decoder
     * begins with, min(rows, lanes) bytes each. Returns the first coded byte: at most rows * columns before 'end',
     * and up to SS_KVRANS_ENCODE_SLACK bytes before that may be overwritten.
     */
    uint8_t *(*encode)(const struct ss_kvrans_plan *plan, uint8_t *end, uint8_t *states_low, uint8_t *states_high);
};

extern const struct ss_kvrans_kernels ss_kvrans_kernels_scalar;
extern const struct ss_kvrans_kernels ss_kvrans_kernels_avx2;
extern const struct ss_kvrans_kernels ss_kvrans_kernels_avx512;
extern const struct ss_kvrans_kernels ss_kvrans_kernels_neon;

/*
 * ss_kvrans_elements_fit() returns whether decode_elements() and decode_planes() take blocks of this shape: they fill
 * registers, and their elements whole lines of memory. That is nearly all that a model's KV comes in.
 */
static inline int ss_kvrans_elements_fit(const struct ss_kvrans_block *block, const void *target) {
    return block->rows == SS_KVRANS_ROWS_MAX && block->columns % SS_KVRANS_GROUP == 0 && (uintptr_t)target % 64 == 0;
}

/*
 * ss_kvrans_entries_fit() returns whether an index with its low bits behind it is one of SS_KVRANS_INDEX_MAX entries,
 * so that it can be looked up as an index can. With 64 bins it has one low bit and 32 indices.
 */
static inline int ss_kvrans_entries_fit(const struct ss_kvrans_block *block) {
    return block->shift == 0 || (block->shift == 1 && block->count <= SS_KVRANS_INDEX_MAX / 2);
}

/* ss_kvrans_entries() writes the byte that each of the SS_KVRANS_INDEX_MAX entries stands for. */
static inline void ss_kvrans_entries(const struct ss_kvrans_block *block, uint8_t *bytes) {
    for (uint32_t entry = 0; entry < SS_KVRANS_INDEX_MAX; entry++) {
        bytes[entry] = (uint8_t)(block->value[entry >> block->shift] + (entry & ((1u << block->shift) - 1)));
    }
}

/* ss_kvrans_kernels_find() returns what ss_isa_active() stands for here, or the next best that this CPU can run. */
const struct ss_kvrans_kernels *ss_kvrans_kernels_find(enum ss_isa isa);

/* ---- Streams ------------------------------------------------------------------------------------------------- */

/* ss_kvrans_bits() returns how many bits number 'count' tables. */
static inline uint32_t ss_kvrans_bits(uint32_t count) {
    return count > 1 ? 32 - (uint32_t)__builtin_clz(count - 1) : 0;
}

/* encode.c: what codecs/codec.h asks for. */
struct ss_kvrans_encoder;
void ss_kvrans_encoder_free(struct ss_kvrans_encoder *encoder);
size_t ss_kvrans_compress_bound(size_t size);
enum ss_result ss_kvrans_compress(const uint8_t *source, size_t size, size_t row_length, uint8_t *target,
                                  size_t target_size, size_t *written);

#endif /* SS_KVRANS_H */
