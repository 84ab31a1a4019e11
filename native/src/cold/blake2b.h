/* SPDX-License-Identifier: Apache-2.0 */
/* blake2b.h - BLAKE2b without a key (RFC 7693) */
#ifndef SS_COLD_BLAKE2B_H
#define SS_COLD_BLAKE2B_H

#include <stddef.h>
#include <stdint.h>

struct ss_blake2b {
    uint64_t state[8];
    uint64_t size; /* bytes so far */
    uint8_t block[128];
    size_t filled;
    size_t digest_size;
};

/* The digest has 1 to 64 bytes. */
void ss_blake2b_begin(struct ss_blake2b *hash, size_t digest_size);
void ss_blake2b_add(struct ss_blake2b *hash, const void *data, size_t size);
void ss_blake2b_end(struct ss_blake2b *hash, uint8_t *digest);

#endif /* SS_COLD_BLAKE2B_H */
