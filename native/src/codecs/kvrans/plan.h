/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h - the decisions of kvrans's encoder: which alphabet, which tables, which column uses which */
#ifndef SS_KVRANS_PLAN_H
#define SS_KVRANS_PLAN_H

#include "codecs/kvrans/kvrans.h"

/* Logarithms to the base 2 in fixed point, so that every machine makes the same decisions. */
enum { SS_KVRANS_LOG_ONE = 65536, SS_KVRANS_LOG_BITS = 11 };

struct ss_kvrans_logs {
    uint16_t fractions[1 << SS_KVRANS_LOG_BITS]; /* log2(1 + i / 2048) * SS_KVRANS_LOG_ONE */
};

/* The plan of a block. Frequencies are by table and index. */
struct ss_kvrans_tables {
    uint32_t count; /* 1 to SS_KVRANS_TABLES_MAX */
    uint8_t frequency[SS_KVRANS_TABLES_MAX][SS_KVRANS_INDEX_MAX];
    uint32_t totals[SS_KVRANS_TABLES_MAX][SS_KVRANS_INDEX_MAX]; /* how often each index is coded with each table */
    uint32_t sums[SS_KVRANS_TABLES_MAX];
    uint64_t coded_bits; /* of all symbols, without low bits */
};

void ss_kvrans_logs_make(struct ss_kvrans_logs *logs);

/* ss_kvrans_alphabet_choose() picks the smallest shift that leaves at most 64 symbols, and lists or ranges them. */
void ss_kvrans_alphabet_choose(const struct ss_kvrans_kernels *kernels, const struct ss_kvrans_extremes *extremes,
                               const uint8_t *source, size_t size, struct ss_kvrans_alphabet *alphabet);

/*
 * ss_kvrans_tables_choose() sorts the columns of a plan, whose counts are there, into 1 to 16 kinds, writes each
 * column's number to 'column_table', and makes their tables.
 */
void ss_kvrans_tables_choose(const struct ss_kvrans_kernels *kernels, const struct ss_kvrans_logs *logs,
                             const struct ss_kvrans_plan *plan, uint32_t index_count, uint8_t *column_table,
                             struct ss_kvrans_tables *tables);

/*
 * ss_kvrans_shift_more() decides whether a block gets smaller when one bit more of each byte is stored as it is, and
 * then makes that alphabet and its tables; the columns keep theirs. Returns whether it did.
 *
 * With 256 slots, whatever occurs at all takes a 256th of a table. Where many symbols are rare, halving their number
 * frees more than the stored bit takes, since neighbours are about equally likely.
 */
int ss_kvrans_shift_more(const struct ss_kvrans_logs *logs, uint64_t cells, struct ss_kvrans_alphabet *alphabet,
                         struct ss_kvrans_tables *tables);

/*
 * ss_kvrans_tables_align() changes the frequencies a little where kernels that look up four slots at once (see
 * avx512_step.h) can then decode with all of a block's tables, and that hardly takes more bits.
 */
void ss_kvrans_tables_align(const struct ss_kvrans_logs *logs, uint32_t index_count, struct ss_kvrans_tables *tables);

#endif /* SS_KVRANS_PLAN_H */
