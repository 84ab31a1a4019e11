/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda.h - copies between a buffer of the pipeline and a GPU's memory that another process has allocated
 *
 * For the software backend beside a GPU. The CUDA driver is loaded when the first such memory is opened, so that
 * nothing here needs CUDA to be built or to run without it.
 */
#ifndef SS_CUDA_H
#define SS_CUDA_H

#include "backends/backend.h"

struct ss_cuda_memory;
struct ss_cuda_channel;

/* ss_cuda_present() returns whether this machine has a CUDA driver, with or without a GPU. */
int ss_cuda_present(void);

/*
 * ss_cuda_memory_open() maps memory of another process by its CUipcMemHandle, on the GPU that 'memory->device' names,
 * and stores its address, which only CUDA can use, in '*address'. From any thread. Fails with SS_NOT_SUPPORTED (no
 * driver), SS_BAD_ARGUMENT (no such GPU, a handle that is none, or of a process that has ended), SS_NO_MEMORY,
 * SS_DEVICE.
 */
enum ss_result ss_cuda_memory_open(const struct ss_memory *memory, struct ss_cuda_memory **opened, uint8_t **address);

/* ss_cuda_memory_close() unmaps it; no copy may be in flight. From any thread. */
void ss_cuda_memory_close(struct ss_cuda_memory *memory);

/*
 * A channel copies for one thread. 'pinned' is the buffer that it copies from or to: page-locked for CUDA with the
 * first copy, since pageable memory is slow and not asynchronous. If page-locking fails, it stays pageable.
 */
struct ss_cuda_channel *ss_cuda_channel_new(struct ss_backend_range pinned);
void ss_cuda_channel_free(struct ss_cuda_channel *channel);

/*
 * ss_cuda_copy() starts to copy work->source to work->target, one of which lies in 'memory': the target, where
 * 'to_gpu'. Completes it in a later ss_cuda_progress(). SS_DEVICE if it was not started.
 */
enum ss_result ss_cuda_copy(struct ss_cuda_channel *channel, struct ss_cuda_memory *memory, struct ss_work *work,
                            int to_gpu);

/* ss_cuda_progress() completes finished copies without waiting, and returns their number. */
uint32_t ss_cuda_progress(struct ss_cuda_channel *channel);

#endif /* SS_CUDA_H */
