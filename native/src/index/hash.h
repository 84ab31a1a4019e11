/* SPDX-License-Identifier: Apache-2.0 */
/* hash.h - the hash of a tenant's key, with a secret seed, so that no client can choose keys that collide */
#ifndef SS_INDEX_HASH_H
#define SS_INDEX_HASH_H

#include <stdint.h>
#include <string.h>

struct ss_hash_seed {
    uint64_t words[4];
};

static inline uint64_t ss_hash_mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

static inline struct ss_hash_seed ss_hash_seed_of(uint64_t seed) {
    struct ss_hash_seed made;
    for (int word = 0; word < 4; word++) {
        made.words[word] = ss_hash_mix(seed += 0x9E3779B97F4A7C15u);
    }
    return made;
}

static inline uint64_t ss_hash_fold(uint64_t first, uint64_t second) {
    unsigned __int128 product = (unsigned __int128)first * second;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* ss_hash_key() hashes a key of 32 bytes. */
static inline uint64_t ss_hash_key(const struct ss_hash_seed *seed, uint64_t tenant, const uint8_t *key) {
    uint64_t words[4];
    memcpy(words, key, sizeof words);
    uint64_t half = ss_hash_fold(words[0] ^ seed->words[0], words[1] ^ seed->words[1]);
    uint64_t other = ss_hash_fold(words[2] ^ seed->words[2], words[3] ^ seed->words[3]);
    return ss_hash_mix(ss_hash_fold(half ^ seed->words[2] ^ tenant, other ^ seed->words[0]) ^ half);
}

#endif /* SS_INDEX_HASH_H */
