/* SPDX-License-Identifier: Apache-2.0 */
/* strided.h - the innermost dimensions of a block, and the kernels that copy them with wider vectors; see strided.c */
#ifndef SS_STRIDED_H
#define SS_STRIDED_H

#include "cpu/cpu.h"

enum { SS_STRIDED_DIMENSIONS = 6, SS_STRIDED_LINE = 64 };

struct ss_dimension {
    uint64_t size;
    int64_t to;   /* bytes from one to the next */
    int64_t from; /* likewise */
};

struct ss_strided {
    struct ss_dimension outer[SS_STRIDED_DIMENSIONS]; /* all but the next */
    uint32_t count;
    struct ss_dimension run;  /* contiguous in the target */
    struct ss_dimension row;  /* contiguous in the source; of size 1 where 'run' is that, too */
    uint64_t element;         /* bytes */
    struct ss_dimension wide; /* of tiles, by twos: from one to that beside it; else of size 0 */
    struct ss_dimension deep; /* likewise to that below it */
    int avx512;               /* whether that is active */
};

#ifdef SS_ARCH_X86_64
/* ss_strided_tiles_avx512() zips or unzips tiles, two side by side. */
void ss_strided_tiles_avx512(const struct ss_strided *shape, uint8_t *to, const uint8_t *from);

/* ss_strided_plane_avx512() transposes a plane of elements of four bytes, 16 times as many runs, and rows. */
void ss_strided_plane_avx512(const struct ss_strided *shape, uint8_t *to, const uint8_t *from);
#endif

#endif /* SS_STRIDED_H */
