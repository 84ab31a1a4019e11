/* SPDX-License-Identifier: Apache-2.0 */
/* cold_forge.h - entries and footers of objects of a bucket, as shadowserve/pool/cold/layout.py writes them */
#ifndef SS_COLD_FORGE_H
#define SS_COLD_FORGE_H

#include "check.h"

enum { COLD_KEY_BYTES = 32, COLD_ENTRY_BYTES = 48, COLD_FOOTER_BYTES = 40 };

static inline size_t cold_footer_bytes(uint32_t records, const char *tenant) {
    return (size_t)records * COLD_ENTRY_BYTES + strlen(tenant) + COLD_FOOTER_BYTES;
}

/* Writes entries and footer for records of 'length' bytes each, with keys without gaps; returns their size. */
static inline size_t cold_footer(uint8_t *target, const uint8_t *keys, uint32_t records, uint32_t length,
                                 const char *tenant) {
    size_t size = cold_footer_bytes(records, tenant);
    uint32_t tenant_length = (uint32_t)strlen(tenant), header_bytes = 1;
    uint64_t offset = 0, object_size = (uint64_t)records * length + size;
    uint8_t *at = target;
    for (uint32_t record = 0; record < records; record++) {
        memcpy(at, keys + (size_t)record * COLD_KEY_BYTES, COLD_KEY_BYTES);
        memcpy(at + 32, &offset, 8);
        memcpy(at + 40, &length, 4);
        memcpy(at + 44, &header_bytes, 4);
        at += COLD_ENTRY_BYTES;
        offset += length;
    }
    memcpy(at, tenant, tenant_length);
    at += tenant_length;
    memcpy(at, "SSCOLD01", 8);
    memcpy(at + 8, &records, 4);
    memcpy(at + 12, &tenant_length, 4);
    memcpy(at + 16, &object_size, 8);
    memset(at + 24, 0, 16); /* the checksum, which the C core does not check */
    return size;
}

#endif /* SS_COLD_FORGE_H */
