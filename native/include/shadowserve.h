/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shadowserve.h - the C core's public API
 *
 * The C core moves and transforms bytes; it makes no policy decisions and prints nothing. Python (shadowserve/native/)
 * is its only caller: it passes whole batches, owns every buffer, and turns the result codes into exceptions.
 *
 * native/cffi_build.py reads the declarations between the two cffi markers, so keep them plain: no macros but
 * SS_API, no #ifdef, no inline functions.
 */
#ifndef SHADOWSERVE_H
#define SHADOWSERVE_H

#include <stddef.h>
#include <stdint.h>

#ifndef SS_API
#define SS_API __attribute__((visibility("default")))
#endif

/* cffi:begin */
/* Result of every call that can fail. Values are stable; new ones go at the end. */
enum ss_result {
    SS_OK = 0,
    SS_BAD_DATA = 1,      /* the bytes do not decode, or decode to another length */
    SS_NO_SPACE = 2,      /* the output buffer is too small */
    SS_BAD_ARGUMENT = 3,  /* a caller's bug: sizes or offsets that do not fit each other */
    SS_NOT_SUPPORTED = 4, /* a codec that was not built in, an ISA that this CPU lacks */
    SS_NO_MEMORY = 5,
    SS_CHECKSUM = 6,      /* the bytes are not the ones that were checksummed */
    SS_NOT_FINITE = 7,    /* a value to quantize is infinite or NaN */
    SS_NOT_FOUND = 8,     /* the server does not hold the key, or not that range of it */
    SS_REFUSED = 9,       /* the server answered an error */
    SS_PROTOCOL = 10,     /* the server's answer is not RESP, or not of the length asked for */
    SS_DISCONNECTED = 11, /* the connection broke */
    SS_DEADLINE = 12,
    SS_CANCELLED = 13,
    SS_SKIPPED = 14,    /* not delivered, because an earlier chunk of its group failed */
    SS_OS_ERROR = 15,   /* a system call failed; errno says why */
    SS_DEVICE = 16,     /* an accelerator failed, also when the work was repeated, or it lost access to the memory */
    SS_REDIRECTED = 17, /* another node of the cluster has it: the server's answer says which */
};

enum ss_codec { SS_CODEC_NONE = 0, SS_CODEC_DEFLATE = 1, SS_CODEC_LZ4 = 2, SS_CODEC_ZSTD = 3, SS_CODEC_KVRANS = 4 };
enum ss_quantizer {
    SS_QUANTIZER_PASSTHROUGH = 0,
    SS_QUANTIZER_LOSSLESS = 1,
    SS_QUANTIZER_BINNED = 2,
    SS_QUANTIZER_WEIGHTED = 3
};
enum ss_dtype {
    SS_DTYPE_UINT8 = 0, /* bytes of any meaning */
    SS_DTYPE_FLOAT16 = 1,
    SS_DTYPE_BFLOAT16 = 2,
    SS_DTYPE_FLOAT32 = 3,
    SS_DTYPE_FLOAT8_E4M3 = 4 /* of OCP's 8-bit formats the one without infinities: up to 448, NaN is 0x7F and 0xFF */
};
enum ss_isa { SS_ISA_SCALAR = 0, SS_ISA_AVX2 = 1, SS_ISA_AVX512 = 2, SS_ISA_NEON = 3 };

/* Bumped when a declaration in this header changes incompatibly. */
SS_API uint32_t ss_abi_version(void);

/* ---- CPU dispatch -------------------------------------------------------------------------------------------- */

/* ss_isa_available() returns whether this build has kernels for 'isa' and this CPU can run them. */
SS_API int ss_isa_available(enum ss_isa isa);

/* ss_isa_active() returns the variant that the kernels use now: the best available, unless forced. */
SS_API enum ss_isa ss_isa_active(void);

/*
 * ss_isa_force() makes every kernel use 'isa' from now on; for tests and benchmarks. Returns SS_NOT_SUPPORTED, and
 * changes nothing, where it is not available. Not to be called while other threads run kernels.
 */
SS_API enum ss_result ss_isa_force(enum ss_isa isa);

/* ---- Checksum ------------------------------------------------------------------------------------------------ */

/* ss_crc32() continues the CRC-32 (IEEE 802.3, reflected, as zlib's crc32) 'crc' over 'size' bytes; start with 0. */
SS_API uint32_t ss_crc32(uint32_t crc, const void *data, size_t size);

/* ---- Codecs -------------------------------------------------------------------------------------------------- */

/*
 * ss_codec_implementation() names the library and version that decodes 'codec', such as "isa-l 2.30.0", in a
 * static string (for Deflate: the library for streams that ss_compress() did not write; for kvrans: the kernels in use
 * now, such as "own, avx512"); NULL if the codec was not built in.
 * SS_CODEC_NONE, SS_CODEC_DEFLATE and SS_CODEC_KVRANS are always built in.
 */
SS_API const char *ss_codec_implementation(enum ss_codec codec);

/*
 * ss_compress_bound() returns the most bytes that ss_compress() writes for 'size' bytes of input; 0 if the codec was
 * not built in or 'size' is over its limit of about 2 GiB.
 */
SS_API size_t ss_compress_bound(enum ss_codec codec, size_t size);

/*
 * ss_compress() encodes 'size' bytes as one stream and stores its length in '*written'. Deflate is raw (RFC 1951),
 * Huffman-only: literals in dynamic blocks, or stored blocks where entropy coding gains nothing. kvrans
 * (docs/design/kvrans.md) treats the source as rows of 'row_length' bytes, a token's symbols, and has a table for each
 * kind of column; 0: no rows. The other codecs ignore 'row_length'. Fails with SS_NO_SPACE if 'target_size' is under
 * ss_compress_bound() and the stream does not fit, SS_NOT_SUPPORTED, SS_NO_MEMORY. Thread-safe.
 */
SS_API enum ss_result ss_compress(enum ss_codec codec, const void *source, size_t size, size_t row_length, void *target,
                                  size_t target_size, size_t *written);

/*
 * ss_decompress() decodes one whole stream to exactly 'target_size' bytes: one byte more or less in either direction
 * is SS_BAD_DATA. Never writes outside the target, never reads outside the source, whatever the source holds.
 * Thread-safe.
 */
SS_API enum ss_result ss_decompress(enum ss_codec codec, const void *source, size_t size, void *target,
                                    size_t target_size);

/* One of several streams that one call decodes. */
struct ss_stream {
    const void *source;
    void *target;
    size_t source_size; /* bytes */
    size_t target_size;
    enum ss_result result; /* out */
};

/*
 * ss_decompress_many() decodes each of 'count' streams, whose targets do not overlap, and stores its 'result'. A stream
 * that fails does not affect the others. Deflate streams without matches, as ss_compress() writes them, are decoded in
 * turns, which is much faster than one after the other. Thread-safe.
 */
SS_API void ss_decompress_many(enum ss_codec codec, struct ss_stream *streams, size_t count);

/* ---- Quantizers ---------------------------------------------------------------------------------------------- */

/* ss_dtype_size() returns the bytes of one element, 0 for an unknown dtype. */
SS_API size_t ss_dtype_size(enum ss_dtype dtype);

/*
 * ss_quantize() turns 'vectors' x 'vector_length' elements of 'source' into symbols, the bytes that are compressed.
 *
 * SS_QUANTIZER_BINNED (ShadowServe section 5, after CacheGen): each vector is scaled by its largest magnitude into
 *   'bins'/2 - 1 steps on either side of zero; a symbol is an int8, one byte for each element, and '*scales' gets one
 *   float for each vector: value ~ symbol * scale. 'bins' is even, 4 to 256. An all-zero vector has scale 0,
 *   and so has one whose scale is too small to have a finite inverse (under about 2^-128): it counts as zero.
 *   Fails with SS_NOT_FINITE for an infinity or NaN.
 * SS_QUANTIZER_LOSSLESS: the bit pattern of each element is rotated left by one, so that the sign leaves the exponent,
 *   and split into byte planes over the whole call, most significant first; dtype-size bytes for each element, no
 *   scales. Exact for every bit pattern.
 * SS_QUANTIZER_PASSTHROUGH: a copy; no scales.
 *
 * 'scales' may be unaligned; only binned uses 'bins'. Every ISA variant writes the same bytes.
 */
SS_API enum ss_result ss_quantize(enum ss_quantizer quantizer, enum ss_dtype dtype, uint32_t bins, const void *source,
                                  size_t vectors, size_t vector_length, uint8_t *symbols, void *scales);

/*
 * ss_dequantize() is the inverse: exact for lossless and passthrough; symbol * scale in single precision, rounded to
 * nearest even in 'dtype', for binned (float8 saturates at its largest number, 448). Fails with SS_BAD_DATA for a scale
 * that is infinite or NaN. Every ISA variant writes the same bytes.
 */
SS_API enum ss_result ss_dequantize(enum ss_quantizer quantizer, enum ss_dtype dtype, const uint8_t *symbols,
                                    const void *scales, size_t vectors, size_t vector_length, void *target);

/*
 * Steps of a group's channels, for SS_QUANTIZER_WEIGHTED; records do not have them. A row is one layer and kind.
 * Numbers are finite, steps positive. Keys, the first kind, may be rotated: channel c of a head with c + 'pairs'.
 */
struct ss_channels {
    const float *steps;        /* rows x vector_length */
    const float *centres;      /* 4 x rows x vector_length: those of a slice's vectors 0, 4, 8 ..., then 1, 5 ... */
    const double *frequencies; /* radians per token, of each pair; NULL without pairs */
    const float *turns;   /* for each token of a slice, from 0 on: the cosine of each pair's angle, then the sines */
    uint32_t rows, kinds; /* rows: layers x kinds */
    uint32_t vector_length;
    uint32_t head_length; /* channels of a head, at most 1024 */
    uint32_t pairs;       /* rotated pairs of each head; 0: none */
    uint32_t tokens;      /* tokens that 'turns' has */
};

/* ss_weighted_exact_max() returns the most bytes that ss_quantize_weighted() writes before the symbols. */
SS_API size_t ss_weighted_exact_max(enum ss_dtype dtype, size_t vectors, size_t vector_length);

/*
 * ss_quantize_weighted() turns vectors of one slice into symbols, one int8 for each element: the number of steps from
 * the channel's centre. 'row' is layer * kinds + kind, 'position' that of the first vector in its prompt. 'exact' has
 * room for ss_weighted_exact_max() bytes. '*exact_length' are written: the position, and exact vectors, which are those
 * of positions 0 to 3, or with an element that is not finite or over 127 steps away. Only 16- and 32-bit floats.
 */
SS_API enum ss_result ss_quantize_weighted(enum ss_dtype dtype, const struct ss_channels *channels, uint32_t row,
                                           uint32_t position, const void *source, size_t vectors, uint8_t *symbols,
                                           void *exact, size_t *exact_length);

/* ss_dequantize_weighted() is the inverse. Fails with SS_BAD_DATA for damaged exact vectors. */
SS_API enum ss_result ss_dequantize_weighted(enum ss_dtype dtype, const struct ss_channels *channels, uint32_t row,
                                             const uint8_t *symbols, const void *exact, size_t exact_length,
                                             size_t vectors, void *target);

/* Description of the elements that a stream's symbols become, and their target. */
struct ss_elements {
    const void *scales; /* binned: a float for every 'scale_vectors' vectors; weighted: exact vectors; any alignment */
    void *target;       /* vectors * vector_length elements; may be unaligned, but is faster at multiples of 64 bytes */
    size_t vectors;
    size_t vector_length;
    size_t scale_vectors; /* binned: vectors that share a scale; the last scale may have fewer; else 1 */
    enum ss_quantizer quantizer;
    enum ss_dtype dtype;
    const struct ss_channels *channels; /* weighted only, as the following fields */
    size_t scales_length;               /* bytes */
    uint32_t row;
};

/*
 * ss_decode_many() combines ss_decompress_many() and ss_dequantize() for each of 'count' streams, and stores its
 * 'result'. The target of a stream is scratch memory for its symbols; its content is undefined afterwards, and so are
 * the elements of a stream that failed. Elements are written with non-temporal stores where the CPU has them, so use
 * this call for elements that are not read again soon. With kvrans, the decoder itself writes lossless elements and, on
 * x86-64, binned elements of 16 bits; the result is the same. SS_BAD_ARGUMENT if sizes are inconsistent. Thread-safe.
 */
SS_API void ss_decode_many(enum ss_codec codec, struct ss_stream *streams, const struct ss_elements *elements,
                           size_t count);

/* ---- The pipeline -------------------------------------------------------------------------------------------- */

/*
 * One slice of one piece: the unit that is compressed, at most 2 MiB decoded (the accelerator's limit). Its stored
 * bytes are its scales, then its encoded stream.
 */
struct ss_slice {
    uint64_t offset;         /* of the stored bytes, from the first byte of the piece's body */
    uint64_t memory_offset;  /* of the dequantized bytes, from the first byte of the group's memory */
    uint32_t scales_length;  /* bytes: binned 4 for each scale; weighted its exact vectors, to encode their most */
    uint32_t encoded_length; /* bytes */
    uint32_t decoded_length; /* bytes of symbols */
    uint32_t checksum;       /* CRC-32 of the stored bytes */
    uint32_t decoded_crc32;  /* CRC-32 of the symbols (checked by accelerators, which return it for free) */
    uint32_t vectors;        /* tokens in the slice */
    uint32_t bins;           /* binned: number of bins, for ss_pipeline_encode(); a fetch ignores it */
    uint32_t row;            /* weighted: row of the group's channels */
    uint32_t position;       /* weighted: position of the first vector in its prompt; a fetch ignores it */
};

/* Source of a piece's body, in a fetch. */
enum ss_origin {
    SS_ORIGIN_SERVER = 0,  /* a server, or a node of a cluster */
    SS_ORIGIN_MEMORY = 1,  /* memory of this process */
    SS_ORIGIN_AWAITED = 2, /* memory of this process, once ss_batch_supply() names the address */
    SS_ORIGIN_NOWHERE = 3  /* none: it was awaited, and could not be read */
};

/*
 * One piece of a batch: consecutive layers of one chunk of one group, from one record. When a record is stored,
 * the piece has all layers. Several pieces may belong to one record. The caller assigns each piece a region in every
 * buffer before the batch starts. Pieces must not share slices, and their regions must not overlap.
 */
struct ss_piece {
    uint8_t key[96]; /* the record's key in wire format */
    uint32_t key_length;
    enum ss_codec codec;
    uint32_t group;                 /* index into the batch's groups */
    uint32_t chunk;                 /* position in the group's chain of chunks, below UINT32_MAX */
    uint64_t record_offset;         /* of the body in the record, that is of the first slice's stored bytes */
    uint64_t body_length;           /* bytes of the body: all slices, in order and without gaps */
    uint64_t decompression_offset;  /* in the decompression buffer, of a region of body_length bytes */
    uint64_t dequantization_offset; /* in the dequantization buffer, of a region of decoded bytes; unused if fused */
    uint32_t slice_first;           /* index into the batch's slices */
    uint32_t slice_count;
    uint32_t node;   /* fetch: index of its node, below the batch's 'node_count' */
    uint32_t asking; /* fetch: 1 to send ASKING first, after a cluster's node answered ASK */
    enum ss_origin origin;
    const uint8_t *memory; /* fetch: address of the body in this process. For a server's piece: memory that keeps the
                              body if the piece ends with SS_OK; NULL: it is not kept */
    uint32_t layer;        /* fetch with 'progress': the layer, or chunk, that 'progress' counts it for */
    uint64_t ended_ns;     /* out: CLOCK_MONOTONIC when all of it had arrived and was delivered; 0: it was not */
    enum ss_result result; /* out */
    char error[256];       /* out, for SS_REFUSED and SS_REDIRECTED: the server's text, truncated, zero-terminated */
};

/* Kind of registered memory. */
enum ss_memory_kind {
    SS_MEMORY_LOCAL = 0,    /* in this process */
    SS_MEMORY_EXPORTED = 1, /* in another process, often of another machine, exported by ss_export_open() */
    SS_MEMORY_CUDA_IPC = 2  /* in a GPU of this machine, with a handle of cuIpcGetMemHandle() */
};

/* Description of memory to register. The call copies it. */
struct ss_memory {
    enum ss_memory_kind kind;
    uint8_t *address;       /* local: here; exported: in the exporting process, never dereferenced; CUDA IPC: NULL */
    uint64_t size;          /* bytes */
    const void *descriptor; /* exported: from ss_export_descriptor(); CUDA IPC: the CUipcMemHandle; local: NULL */
    size_t descriptor_size; /* bytes */
    const char *device;     /* CUDA IPC: the GPU's PCI address; else NULL */
};

struct ss_pipeline;
struct ss_registered_memory;
struct ss_tls;
struct ss_tls_session;

/*
 * One group of a batch: the elements of all its pieces, and the memory that they are delivered to or stored from. Its
 * chunks are a prefix chain: a chunk is useful only if all earlier chunks are complete, with all requested layers.
 */
struct ss_group {
    enum ss_quantizer quantizer;
    enum ss_dtype dtype;
    uint32_t scale_vectors; /* binned: number of vectors of a slice that share a scale; the last scale may have fewer */
    uint32_t vector_length; /* elements */
    uint8_t *memory;        /* first byte; if registered, within the registered memory (ss_memory_address()) */
    uint64_t memory_size;   /* bytes */
    struct ss_registered_memory *registered; /* the registration of 'memory'; NULL: plain memory, for a CPU only */
    const struct ss_channels *channels;      /* weighted: steps of the channels; else NULL */
};

/*
 * All pieces of a batch that are at one node, in one request, KV.LAYERS, which our storage server answers layer after
 * layer: 'layers' times the same 'keys' chunks of one group, one layer of each, in the order of the batch's pieces.
 */
struct ss_layers {
    uint32_t node;          /* below the batch's 'node_count' */
    const uint8_t *request; /* in wire format */
    uint64_t request_size;  /* bytes */
    uint32_t layers;
    uint32_t keys;          /* at most 8192 */
    const uint32_t *pieces; /* indexes of these pieces in the batch, row by row, ascending */
    uint32_t refused;       /* out: the server answered an error, and the pieces were fetched by GETRANGE instead */
    char error[256];        /* out: its text, truncated, zero-terminated */
};

/*
 * One batch: pieces of some groups, at most 16384 pieces and 64 groups. A fetch moves each piece from its source (a
 * server, a node of a cluster, memory) to its group's memory; a store reads the group's memory. Pieces are requested in
 * the order of the list: chunk by chunk, or layer by layer. The caller sets the fields that are not marked 'out', sets
 * the others to zero, and changes nothing until the call that runs the batch returns. The core does not check whether
 * slices overlap in the group's memory.
 */
struct ss_batch {
    struct ss_piece *pieces;
    struct ss_slice *slices;
    struct ss_group *groups;
    uint32_t piece_count;
    uint32_t slice_count;
    uint32_t group_count;
    uint32_t cancelled;                     /* set by ss_batch_cancel(); 0 at first */
    uint64_t deadline_ns;                   /* CLOCK_MONOTONIC */
    uint64_t received_bytes;                /* out: over the wire */
    uint64_t delivered_bytes;               /* out: into the groups' memory */
    uint32_t sockets_in_sync;               /* out: no socket holds half an answer, so all can be used again */
    uint32_t node_count;                    /* fetch: number of nodes that the sockets lead to; 0: one */
    struct ss_tls_session *const *sessions; /* fetch: TLS session of each socket, NULL for none; NULL: no TLS */
    uint32_t *progress;       /* fetch: word that receives the number of leading layers in place; NULL: none */
    uint32_t layers_first;    /* with 'progress': layers that were in place before the batch */
    uint32_t layers_end;      /* with 'progress': layers in place after it, at most 4096 more: the batch has all missing
                                 pieces of the layers from 'layers_first' on */
    uint64_t rate;            /* fetch: most delivered bytes per second; 0: no limit */
    struct ss_layers *layers; /* fetch over one socket to each node: the single request to each of some nodes, in the
                                 order of nodes, which may support KV.LAYERS; other nodes' pieces: GETRANGE for each */
    uint32_t layers_count;    /* number of these requests */
};

enum ss_stage {
    SS_STAGE_NET = 0,
    SS_STAGE_DECOMPRESS = 1,
    SS_STAGE_DEQUANTIZE = 2,
    SS_STAGE_DMA = 3,
    SS_STAGE_QUANTIZE = 4,
    SS_STAGE_COMPRESS = 5,
    SS_STAGE_PUT = 6,
    SS_STAGE_COUNT = 7
};

struct ss_stage_statistics {
    uint64_t items;
    uint64_t input_bytes;
    uint64_t output_bytes;
    uint64_t busy_ns; /* CPU time of all threads of the stage; waiting does not count */
};

/* Core lists hold one entry for each thread; -1 leaves that thread unpinned. */
struct ss_pipeline_options {
    size_t options_size;           /* sizeof(struct ss_pipeline_options), so that it can grow */
    const char *backend;           /* "software" or "doca" */
    const char *device;            /* PCI address or name of the backend's device; "" or NULL: the first that can */
    uint32_t fused;                /* decompress, dequantize and deliver a slice in one step, on a decompress thread */
    uint32_t queue_depth;          /* slices in each queue between stages */
    uint32_t requests_in_flight;   /* range requests sent ahead on each connection */
    uint32_t pin_memory;           /* lock the buffers in memory; a failure is no error: ss_pipeline_locked_bytes() */
    uint64_t decompression_bytes;  /* size of the decompression buffer */
    uint64_t dequantization_bytes; /* of the dequantization buffer; 0 when fused */
    uint64_t dma_source_bytes;     /* of the DMA source buffer: bytes that a batch delivers; 0 when fused */
    uint64_t store_bytes;          /* of the buffer that stored bodies are encoded into */
    const int32_t *net_cores;
    const int32_t *decompress_cores;
    const int32_t *dequantize_cores; /* unused when fused */
    const int32_t *dma_cores;        /* unused when fused */
    const int32_t *store_cores;
    uint32_t net_threads; /* also the number of connections that a batch uses to each node */
    uint32_t decompress_threads;
    uint32_t dequantize_threads;
    uint32_t dma_threads;
    uint32_t store_threads;
    uint32_t trace_events;     /* capacity of each thread's log, in events of 56 bytes; 0: no tracing */
    uint32_t poll_interval_us; /* pause between two polls of a device without a result; 0: no pause. At most 1 s */
    uint32_t nodes_max;        /* most nodes of a cluster in one batch, at most 256; 0: one */
    /*
     * Longest time without a result while a device has work; 0: ten seconds. Then the device is abandoned, see
     * ss_pipeline_given_up(). Time in which the waiting thread does not run, as in a suspended machine, does not count.
     */
    uint32_t device_timeout_ms;
};

/* ---- Backends ------------------------------------------------------------------------------------------------ */

/*
 * ss_backend_description() describes backend 'name' of this build, such as "CPU", "DOCA 2.9.1" or
 * "DOCA emulator 3.0.0", in a static string; NULL if this build has no such backend.
 */
SS_API const char *ss_backend_description(const char *name);

/* ss_backend_emulated() returns whether that backend only imitates its hardware. */
SS_API int ss_backend_emulated(const char *name);

/*
 * ss_device_error() writes the last error of a device's library in this process, such as
 * "doca_mmap_start: DOCA_ERROR_DRIVER", cut to 'size' - 1 bytes; "" if there was none. It explains why a call ended
 * with SS_NOT_SUPPORTED, SS_BAD_ARGUMENT, SS_NO_MEMORY or SS_DEVICE. From any thread.
 */
SS_API void ss_device_error(char *text, size_t size);

/* ---- Life of a pipeline -------------------------------------------------------------------------------------- */

/*
 * ss_pipeline_create() allocates, touches and locks all buffers and starts and pins all threads; nothing is allocated
 * afterwards. Fails with SS_BAD_ARGUMENT, SS_NOT_SUPPORTED (unknown backend, no suitable device, or options that the
 * backend does not support), SS_NO_MEMORY, SS_OS_ERROR (errno), SS_DEVICE.
 */
SS_API enum ss_result ss_pipeline_create(const struct ss_pipeline_options *options, struct ss_pipeline **pipeline);

/*
 * ss_pipeline_destroy() stops the threads and frees the buffers. No call may be in progress. NULL is allowed. If the
 * device was abandoned, all memory that the device may still use is kept until the process ends.
 */
SS_API void ss_pipeline_destroy(struct ss_pipeline *pipeline);

/* ss_pipeline_device() returns the name of the open device, "" if the backend has none. */
SS_API const char *ss_pipeline_device(const struct ss_pipeline *pipeline);

/*
 * ss_pipeline_given_up() returns 1 once a device did not finish its work in 'device_timeout_ms'. The pipeline never
 * uses that device again: its work and all later work fail with SS_DEVICE. Such a device may still read and write the
 * memory of the failed batches, and this pipeline's buffers, until the process ends: do not report them as quiet
 * before. From any thread.
 */
SS_API int ss_pipeline_given_up(const struct ss_pipeline *pipeline);

/* ss_pipeline_memory_kinds() returns a mask with bit 1 << kind for each kind that ss_memory_register() supports. */
SS_API uint32_t ss_pipeline_memory_kinds(const struct ss_pipeline *pipeline);

/* ss_pipeline_locked_bytes() returns the number of bytes of the buffers that are locked in memory. */
SS_API uint64_t ss_pipeline_locked_bytes(const struct ss_pipeline *pipeline);

/*
 * ss_memory_register() registers memory with the pipeline's backend, once for any number of batches. A device reaches
 * no other memory. The memory, and its export if it has one, must exist until ss_memory_release(). Fails with
 * SS_NOT_SUPPORTED (the backend does not support this kind), SS_BAD_ARGUMENT (invalid descriptor), SS_NO_MEMORY,
 * SS_DEVICE. From any thread, also during batches.
 */
SS_API enum ss_result ss_memory_register(struct ss_pipeline *pipeline, const struct ss_memory *memory,
                                         struct ss_registered_memory **registered);

/*
 * ss_memory_release() ends the registration. No batch may use it, and the pipeline must still exist. If its device was
 * abandoned, the device keeps its access, so the memory must then exist until the process ends.
 */
SS_API void ss_memory_release(struct ss_registered_memory *registered);

/* ss_memory_address() returns the first address of the memory, as groups name it. */
SS_API uint8_t *ss_memory_address(const struct ss_registered_memory *registered);

/*
 * ss_pipeline_fetch() runs one batch over 'socket_count' connected, authenticated, non-blocking sockets. It requests an
 * equal share of every piece's slices on each socket with GETRANGE, receives them into the decompression buffer, and
 * passes each slice on as soon as it is complete: checksum, decompress, dequantize, deliver.
 *
 * A piece in memory: a backend that can read any memory decodes it in place, and it needs no region in the
 * decompression buffer; else it is copied there. It must not change until the call returns. A batch of such pieces
 * alone needs no sockets. An awaited piece delays only itself and the end of the batch. A server's piece with 'memory'
 * is received there, or copied there when it is in place; the memory is undefined unless the piece is SS_OK.
 *
 * Several nodes: the sockets are in node order, the same number for each, at most 'net_threads'. A piece is requested
 * on the sockets of its node. If the node answers MOVED or ASK, the piece is SS_REDIRECTED and its 'error' has the
 * answer; this does not fail other pieces.
 *
 * Failure: pieces of the same group and of the same or a later chunk become SS_SKIPPED, unless they are in place. All
 * other pieces continue. A broken connection fails the pieces that are outstanding on it.
 *
 * The call blocks until the batch is quiet: afterwards nothing reads or writes the groups' memory or the batch, except
 * an abandoned device (ss_pipeline_given_up()). It returns shortly after 'deadline_ns' at the latest, earlier when
 * cancelled; if a device has work, when the device has finished it or is abandoned. Every piece has its own 'result'.
 * Returns SS_OK if all pieces are SS_OK, else the result of the first failed piece in the list; errno for SS_OS_ERROR.
 *
 * 'sockets_in_sync' tells whether the sockets can be used again. They can after well-formed answers (SS_OK, and usually
 * SS_NOT_FOUND, SS_REFUSED, SS_CHECKSUM and SS_BAD_DATA): the outstanding answers were then read and dropped. Otherwise
 * close the sockets. A socket with half an answer left is already disconnected, so it cannot be taken for a new answer.
 *
 * SS_BAD_ARGUMENT, before any byte moves, if numbers of the batch are inconsistent or exceed the buffers, or if a fetch
 * is running: one at a time for each pipeline. ss_pipeline_encode() may run at the same time.
 */
SS_API enum ss_result ss_pipeline_fetch(struct ss_pipeline *pipeline, struct ss_batch *batch, const int32_t *sockets,
                                        uint32_t socket_count);

/* ss_batch_cancel() makes the running batch end soon with SS_CANCELLED; ss_pipeline_unlimit() sets its rate to 0. */
SS_API void ss_batch_cancel(struct ss_batch *batch);
SS_API void ss_pipeline_unlimit(struct ss_pipeline *pipeline);

/*
 * ss_batch_supply() gives the address of an awaited piece's body, which must not change until the call that runs the
 * batch returns; NULL fails the piece with SS_NOT_FOUND. Once for each piece, before or during the batch. From any
 * thread.
 */
SS_API void ss_batch_supply(struct ss_batch *batch, uint32_t piece, const uint8_t *memory);

/*
 * ss_pipeline_copy_body() copies the body of a piece that ss_pipeline_encode() has made to 'target', which has room for
 * its body_length. SS_BAD_ARGUMENT if the piece is not in the store buffer.
 */
SS_API enum ss_result ss_pipeline_copy_body(const struct ss_pipeline *pipeline, const struct ss_piece *piece,
                                            uint8_t *target);

/*
 * ss_progress_wait() waits until the word differs from 'seen', at most 'timeout_ns', and returns the word. All layers
 * that the word counts can then be read, in any process that maps the memory.
 */
SS_API uint32_t ss_progress_wait(const uint32_t *progress, uint32_t seen, uint64_t timeout_ns);

/* ss_progress_tell() sets such a word and wakes its waiters, for layers that were placed without a batch. */
SS_API void ss_progress_tell(uint32_t *progress, uint32_t layers);

/*
 * ss_pipeline_encode() quantizes and compresses the pieces of a batch from their groups' memory into the store buffer.
 * Each piece becomes the body of a record. It runs on the store threads at low priority, and a running fetch goes
 * first. The backend first copies slices of memory that is not local. For each slice the caller sets
 * memory_offset, decoded_length, scales_length, vectors and bins; the call sets offset, encoded_length, checksum
 * and decoded_crc32. For each piece the caller sets group, codec, slices and decompression_offset, which here is the
 * offset in the store buffer of a region for the compress bound of all slices; the call sets body_length and result.
 *
 * Blocks until quiet. One call at a time (a second one is SS_BAD_ARGUMENT). After the first piece that failed, later
 * ones may be SS_SKIPPED; returns the first failed piece's result. 'deadline_ns' and ss_batch_cancel() apply. Fails
 * with SS_NOT_FINITE as ss_quantize() does.
 */
SS_API enum ss_result ss_pipeline_encode(struct ss_pipeline *pipeline, struct ss_batch *batch);

/* ---- TLS to storage ------------------------------------------------------------------------------------------ */

/* ss_tls_library() returns the TLS library and its version, NULL if this build has none. */
SS_API const char *ss_tls_library(void);

/*
 * ss_tls_create() reads the trusted authorities and, unless both are NULL, the own certificate and its key: PEM files.
 * SS_BAD_DATA if a file is not usable, SS_NOT_SUPPORTED if this build has no TLS; 'error' is the cause, cut to
 * 'error_size' - 1 bytes.
 */
SS_API enum ss_result ss_tls_create(const char *authorities, const char *certificate, const char *key,
                                    struct ss_tls **tls, char *error, size_t error_size);

/* ss_tls_destroy() may be called before the sessions' end. NULL is allowed. */
SS_API void ss_tls_destroy(struct ss_tls *tls);

/*
 * ss_tls_session_create() begins a session on a connected, non-blocking socket. The caller owns the socket, and keeps
 * it open until ss_tls_session_destroy(). The server's certificate must have 'name', a host name or an IP address. Only
 * one thread at a time may use a session, and no other bytes go over its socket.
 */
SS_API enum ss_result ss_tls_session_create(struct ss_tls *tls, int32_t socket, const char *name,
                                            struct ss_tls_session **session);
SS_API void ss_tls_session_destroy(struct ss_tls_session *session);

/*
 * These three calls never block. SS_OK with '*events' 0: complete; with POLLIN or POLLOUT: call again with the same
 * arguments when the socket is ready. Any other result ends the session: SS_DISCONNECTED, or SS_PROTOCOL if the peer
 * does not use TLS, is not trusted, or its bytes were changed in transit; ss_tls_reason() returns the cause.
 */
SS_API enum ss_result ss_tls_handshake(struct ss_tls_session *session, uint32_t *events);
SS_API enum ss_result ss_tls_send(struct ss_tls_session *session, const void *data, size_t size, size_t *sent,
                                  uint32_t *events);
SS_API enum ss_result ss_tls_receive(struct ss_tls_session *session, void *data, size_t size, size_t *received,
                                     uint32_t *events);
SS_API const char *ss_tls_reason(const struct ss_tls_session *session);

/* ss_tls_has_pending() returns whether the session has received bytes that are not yet read. */
SS_API int ss_tls_has_pending(const struct ss_tls_session *session);

/*
 * ss_pipeline_put() sends SET key head+body for one encoded piece on one connected, non-blocking socket and waits for
 * the answer until 'deadline_ns'. The key is sent unchanged. SS_REFUSED if the server answers an error; 'error' then
 * has its text, cut to 'error_size' - 1 bytes. After any other failure close the socket. If a server refuses before it
 * has read the value, the result is also SS_REFUSED, but the socket is disconnected. Runs on the caller's thread; calls
 * for different sockets may run at the same time. 'session': the socket's TLS session; NULL: no TLS. With 'lasts_ms'
 * other than 0 the command is SET with NX and PX: the record expires after this time, an existing value stays as it is.
 */
SS_API enum ss_result ss_pipeline_put(struct ss_pipeline *pipeline, const struct ss_piece *piece, const void *head,
                                      size_t head_size, uint32_t lasts_ms, int32_t socket,
                                      struct ss_tls_session *session, uint64_t deadline_ns, char *error,
                                      size_t error_size);

/* ss_pipeline_statistics() copies the counters since creation into statistics[SS_STAGE_COUNT]. From any thread. */
SS_API void ss_pipeline_statistics(const struct ss_pipeline *pipeline, struct ss_stage_statistics *statistics);

/*
 * A span of one stage thread's time in a fetch batch: a slice in a stage, or in SS_STAGE_NET the bytes of one system
 * call. Spans of one thread and stage are in the order of their ends, and either nest or do not overlap: slices that
 * are decompressed in turns share their end, and queued work of a device begins when the work before it ends. When
 * fused, the decompress thread also has the SS_STAGE_DEQUANTIZE span of a slice, which delivers it.
 */
struct ss_trace_event {
    uint64_t begin_ns; /* CLOCK_MONOTONIC */
    uint64_t end_ns;
    uint64_t input_bytes;
    uint64_t output_bytes;
    uint32_t batch;  /* of the pipeline, counted from 1 */
    uint32_t piece;  /* index in the batch */
    uint32_t slice;  /* likewise; UINT32_MAX for SS_STAGE_NET */
    int32_t core;    /* core at the span's end */
    uint32_t stage;  /* enum ss_stage */
    uint32_t thread; /* index among the stage's threads */
};

/*
 * ss_pipeline_trace_start() begins a recording, and ends the previous one. ss_pipeline_trace_stop() ends it; threads
 * may still add the event that they are writing. Each log keeps its first 'trace_events' events. From any thread.
 * SS_NOT_SUPPORTED if the pipeline was created without 'trace_events'.
 */
SS_API enum ss_result ss_pipeline_trace_start(struct ss_pipeline *pipeline);
SS_API void ss_pipeline_trace_stop(struct ss_pipeline *pipeline);

/*
 * ss_pipeline_trace_read() copies the last recording's events, at most 'count_max', thread by thread, and returns their
 * number; '*dropped' gets the number of events that did not fit into a log. During a recording it copies the events
 * recorded so far. Do not call it during ss_pipeline_trace_start().
 */
SS_API uint64_t ss_pipeline_trace_read(struct ss_pipeline *pipeline, struct ss_trace_event *events, uint64_t count_max,
                                       uint64_t *dropped);

/* ---- Guarded mappings of files --------------------------------------------------------------------------------- */

struct ss_guard;

/*
 * ss_guard_open() protects this process against SIGBUS, if the file of a mapping shrinks or its file system is full. An
 * access to a lost page replaces the whole mapping with private memory of zeros, and marks it as lost. 'address' is the
 * first address of the mapping, at a page; keep it mapped until ss_guard_close(). The call installs a SIGBUS handler,
 * unless it is the present one; the handler passes on signals that do not concern guarded memory. A thread that blocks
 * SIGBUS is not protected. SS_BAD_ARGUMENT, SS_NO_MEMORY, SS_OS_ERROR (errno). From any thread.
 */
SS_API enum ss_result ss_guard_open(void *address, uint64_t size, struct ss_guard **guard);

/* ss_guard_lost() returns whether the mapping was lost: call it after the last access; if so, discard the read bytes.
 */
SS_API int ss_guard_lost(const struct ss_guard *guard);

/* ss_guard_close() ends the protection; no thread may access the memory during the call. NULL is allowed. */
SS_API void ss_guard_close(struct ss_guard *guard);

/* ---- Memory in another order ----------------------------------------------------------------------------------- */

/*
 * ss_copy_strided() copies 'count' blocks of one shape, from the addresses in 'from' to the addresses in 'to'. A block
 * has up to six dimensions of 'sizes' elements, of 1, 2, 4 or 8 bytes; strides are bytes from one element to the next
 * of a dimension. Elements of a target must not overlap each other or a source. SS_BAD_ARGUMENT for other dimensions or
 * elements. Thread-safe.
 */
SS_API enum ss_result ss_copy_strided(void *const *to, const void *const *from, uint64_t count, uint32_t dimensions,
                                      const uint64_t *sizes, const int64_t *to_strides, const int64_t *from_strides,
                                      uint32_t element_bytes);

/* ---- Memory for other machines' pipelines --------------------------------------------------------------------- */

struct ss_export;

/*
 * ss_export_open() allows a DPU to read and write 'size' bytes at 'address', and makes a descriptor of them for a
 * pipeline on the DPU: SS_MEMORY_EXPORTED. 'device' is the PCI address or name of one of the DPU's functions on this
 * host; "" or NULL: the first suitable one. 'dmabuf_fd' is -1 for host memory, or for GPU memory with nvidia-peermem;
 * else the DMA-BUF of the GPU memory at 'address'. Memory, descriptor of the DMA-BUF and export must exist while a
 * pipeline uses them. Fails with SS_NOT_SUPPORTED (no such device, or it cannot export), SS_BAD_ARGUMENT, SS_NO_MEMORY,
 * SS_DEVICE.
 */
SS_API enum ss_result ss_export_open(const char *device, void *address, uint64_t size, int32_t dmabuf_fd,
                                     struct ss_export **exported);

/*
 * ss_export_descriptor() returns the descriptor. Any process that has it can access the memory: send it over trusted
 * connections only.
 */
SS_API void ss_export_descriptor(const struct ss_export *exported, const void **bytes, size_t *size);

/* ss_export_close() ends the export; later transfers of importers fail. NULL is allowed. */
SS_API void ss_export_close(struct ss_export *exported);
/* cffi:end */

#endif /* SHADOWSERVE_H */
