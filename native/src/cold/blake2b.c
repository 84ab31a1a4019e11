/* SPDX-License-Identifier: Apache-2.0 */
/* blake2b.c - BLAKE2b without a key (RFC 7693), for little-endian machines */
#include "cold/blake2b.h"

#include <string.h>

enum { BLOCK_BYTES = 128, ROUNDS = 12 };

static const uint64_t INITIAL[8] = {
    0x6A09E667F3BCC908u, 0xBB67AE8584CAA73Bu, 0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u,
    0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu, 0x1F83D9ABFB41BD6Bu, 0x5BE0CD19137E2179u,
};

static const uint8_t ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint64_t rotated(uint64_t value, int bits) {
    return value >> bits | value << (64 - bits);
}

static void mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = rotated(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = rotated(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 63);
}

static void compress(struct ss_blake2b *hash, uint64_t last) {
    uint64_t v[16], words[16];
    memcpy(words, hash->block, sizeof words);
    memcpy(v, hash->state, sizeof hash->state);
    memcpy(v + 8, INITIAL, sizeof INITIAL);
    v[12] ^= hash->size;
    v[14] ^= last;
    for (int round = 0; round < ROUNDS; round++) {
        const uint8_t *at = ORDER[round % 10];
        mix(v, 0, 4, 8, 12, words[at[0]], words[at[1]]);
        mix(v, 1, 5, 9, 13, words[at[2]], words[at[3]]);
        mix(v, 2, 6, 10, 14, words[at[4]], words[at[5]]);
        mix(v, 3, 7, 11, 15, words[at[6]], words[at[7]]);
        mix(v, 0, 5, 10, 15, words[at[8]], words[at[9]]);
        mix(v, 1, 6, 11, 12, words[at[10]], words[at[11]]);
        mix(v, 2, 7, 8, 13, words[at[12]], words[at[13]]);
        mix(v, 3, 4, 9, 14, words[at[14]], words[at[15]]);
    }
    for (int word = 0; word < 8; word++) {
        hash->state[word] ^= v[word] ^ v[word + 8];
    }
}

void ss_blake2b_begin(struct ss_blake2b *hash, size_t digest_size) {
    memset(hash, 0, sizeof *hash);
    memcpy(hash->state, INITIAL, sizeof INITIAL);
    hash->state[0] ^= 0x01010000u ^ digest_size;
    hash->digest_size = digest_size;
}

void ss_blake2b_add(struct ss_blake2b *hash, const void *data, size_t size) {
    const uint8_t *bytes = data;
    while (size != 0) {
        if (hash->filled == BLOCK_BYTES) { /* a full block waits until it is known not to be the last one */
            compress(hash, 0);
            hash->filled = 0;
        }
        size_t part = BLOCK_BYTES - hash->filled < size ? BLOCK_BYTES - hash->filled : size;
        memcpy(hash->block + hash->filled, bytes, part);
        hash->filled += part;
        hash->size += part;
        bytes += part;
        size -= part;
    }
}

void ss_blake2b_end(struct ss_blake2b *hash, uint8_t *digest) {
    memset(hash->block + hash->filled, 0, BLOCK_BYTES - hash->filled);
    compress(hash, UINT64_MAX);
    memcpy(digest, hash->state, hash->digest_size);
}
