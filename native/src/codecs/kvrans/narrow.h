/* SPDX-License-Identifier: Apache-2.0 */
/*
 * narrow.h - what the AVX2 and the NEON decoder of kvrans share: small tables, and all that is not done in
 * vectors
 *
 * Neither can look up one of 256 bytes in one go. But slots are in the order of their symbols, so which symbol a slot
 * has need not be looked up whole: it is enough to know which one the first of eight slots has, and to count how many
 * symbols begin among the next seven. Symbols are numbered by rank, their order among those that the table has.
 */
#ifndef SS_KVRANS_NARROW_H
#define SS_KVRANS_NARROW_H

#include "codecs/kvrans/kvrans.h"

enum {
    SS_KVRANS_EIGHTS = SS_KVRANS_SLOTS / 8,
    SS_KVRANS_TILE = 64,       /* columns that are decoded before they are turned into pieces of rows: a cache line */
    SS_KVRANS_READ_BEYOND = 32 /* bytes that a decoder may read behind those that it takes */
};

/* One table. */
struct ss_kvrans_ranks {
    _Alignas(64) uint8_t base[SS_KVRANS_EIGHTS]; /* rank of the first of eight slots */
    uint8_t breaks[SS_KVRANS_EIGHTS];            /* bit i is set where the (i + 2)nd of them is a symbol's first */
    uint8_t frequency[SS_KVRANS_INDEX_MAX];      /* these by rank */
    uint8_t start[SS_KVRANS_INDEX_MAX];
    uint8_t value[SS_KVRANS_INDEX_MAX];
};

/* A block that is being decoded. All arrays may be read, and written, in whole registers. */
struct ss_kvrans_decoding {
    struct ss_kvrans_ranks tables[SS_KVRANS_TABLES_MAX];
    _Alignas(64) uint8_t low[SS_KVRANS_LANES_MAX]; /* bytes of the states */
    _Alignas(64) uint8_t high[SS_KVRANS_LANES_MAX];
    _Alignas(64) uint8_t tile[SS_KVRANS_TILE * SS_KVRANS_ROWS_MAX]; /* decoded bytes, column by column */
    uint8_t tail[2 * (SS_KVRANS_ROWS_MAX + SS_KVRANS_READ_BEYOND)]; /* the last coded bytes */
    const uint8_t *next;                                            /* coded byte */
    const uint8_t *end;
    uint32_t in_tail;
    uint32_t table_count;
    uint32_t index_count; /* behind the last index that any table has */
    uint32_t symbols;     /* of the table with the most of them: 2 to 64 */
};

/* Vector kernels, separate for each instruction set. */
struct ss_kvrans_decode_steps {
    void (*prepare)(struct ss_kvrans_decoding *decoding); /* changes the layout of the block's tables; may be NULL */

    /*
     * column[n] decodes one column to 'target', with a table of up to 16 * (n + 1) symbols. All columns of a block use
     * the same n: a branch that changes from column to column is mispredicted, which costs more than useless steps.
     */
    void (*column[SS_KVRANS_INDEX_MAX / 16])(struct ss_kvrans_decoding *decoding, const struct ss_kvrans_block *block,
                                             const struct ss_kvrans_ranks *table, uint8_t *target);

    /* add_low_bits() adds 'shift' planes of low bits to the bytes of one column. */
    void (*add_low_bits)(const uint8_t *planes, uint32_t rows, uint32_t shift, uint8_t *target);

    /* tile_store() writes 'columns' decoded columns as pieces of rows. */
    void (*tile_store)(const uint8_t *tile, uint32_t rows, size_t stride, uint32_t columns, uint8_t *target);

    /* place() returns which column of a tile is decoded to where 'column' would be, for elements of 'size' bytes. */
    uint32_t (*place)(uint32_t column, uint32_t size);

    /*
     * elements_lay() lays out the elements of a row for rows_make(), which looks them up by their entry: 'count' lower
     * bytes, and as many upper ones.
     */
    void (*elements_lay)(const uint16_t *elements, uint32_t count, uint8_t *bytes);

    /* rows_make() makes elements of 'count' lines of a tile's columns, which are the block's from 'at' on. */
    void (*rows_make)(const struct ss_kvrans_making *making, const uint8_t *lines, uint32_t row, uint32_t count,
                      size_t at);
};

/* ss_kvrans_decode_by_steps() is the decode() of struct ss_kvrans_kernels. */
enum ss_result ss_kvrans_decode_by_steps(const struct ss_kvrans_decode_steps *steps,
                                         const struct ss_kvrans_block *block, uint8_t *target);

/* These are decode_elements() and decode_planes(). */
enum ss_result ss_kvrans_elements_by_steps(const struct ss_kvrans_decode_steps *steps,
                                           const struct ss_kvrans_block *block, enum ss_dtype dtype,
                                           const float *scales, struct ss_kvrans_elements *scratch, uint8_t *target);
enum ss_result ss_kvrans_planes_by_steps(const struct ss_kvrans_decode_steps *steps,
                                         const struct ss_kvrans_block *block, const struct ss_kvrans_planes *planes,
                                         uint8_t *target);

/*
 * SS_KVRANS_COLUMN_DECODE() defines a member of column[] for tables of up to 16 * 'size' symbols, from a
 * column_decode() that takes the size as a constant. SS_KVRANS_DECODERS() defines the decoders of struct
 * ss_kvrans_kernels by 'steps'.
 */
#define SS_KVRANS_COLUMN_DECODE(attributes, size)                                                                      \
    attributes static void column_decode_##size(struct ss_kvrans_decoding *decoding,                                   \
                                                const struct ss_kvrans_block *block,                                   \
                                                const struct ss_kvrans_ranks *table, uint8_t *target) {                \
        column_decode(decoding, block, table, size, target);                                                           \
    }

/* A block that is being encoded. */
struct ss_kvrans_encoding {
    struct ss_kvrans_encode_table tables[SS_KVRANS_TABLES_MAX]; /* copies of the plan's */
    _Alignas(64) uint8_t low[SS_KVRANS_LANES_MAX];
    _Alignas(64) uint8_t high[SS_KVRANS_LANES_MAX];
    _Alignas(64) uint8_t order[256][8]; /* for each mask of eight lanes, the lanes in it, so that they come last */
    uint8_t count[256];                 /* how many these are */
    uint32_t table_count;
    uint32_t index_count; /* behind the last index that any table has */
};

void ss_kvrans_encoding_begin(struct ss_kvrans_encoding *encoding, const struct ss_kvrans_plan *plan);

#endif /* SS_KVRANS_NARROW_H */
