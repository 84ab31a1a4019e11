/* SPDX-License-Identifier: Apache-2.0 */
/* scalar.h - the scalar kernels of the encoder, for variants that have nothing better for one of them */
#ifndef SS_KVRANS_SCALAR_H
#define SS_KVRANS_SCALAR_H

#include "codecs/kvrans/kvrans.h"

void ss_kvrans_transpose_scalar(const struct ss_kvrans_plan *plan, const uint8_t *source,
                                struct ss_kvrans_extremes *extremes);
void ss_kvrans_map_scalar(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet,
                          uint8_t *planes);
void ss_kvrans_present_scalar(const uint8_t *source, size_t size, uint8_t *seen);
void ss_kvrans_count_scalar(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet);
void ss_kvrans_total_scalar(const struct ss_kvrans_plan *plan, const uint8_t *column_table, uint32_t index_count,
                            uint32_t (*totals)[SS_KVRANS_INDEX_MAX]);
void ss_kvrans_assign_scalar(const struct ss_kvrans_plan *plan, const struct ss_kvrans_costs *costs,
                             uint32_t index_count, uint8_t *column_table);
uint8_t *ss_kvrans_encode_scalar(const struct ss_kvrans_plan *plan, uint8_t *end, uint8_t *states_low,
                                 uint8_t *states_high);

#endif /* SS_KVRANS_SCALAR_H */
