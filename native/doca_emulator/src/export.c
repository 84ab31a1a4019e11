/* SPDX-License-Identifier: Apache-2.0 */
/*
 * export.c - memory of another process of this machine
 *
 * On a card, an exported range is reached over PCI. Here the importer's worker copies with process_vm_readv() and
 * process_vm_writev(), which fail after the exporter, or its memory, is gone. A random token proves that the process
 * with this number still has this export: the descriptor has the token's address in the exporter, which erases the
 * token when its mmap is destroyed.
 *
 * Where Yama restricts ptrace, a process lets others read it by PR_SET_PTRACER. Both must run under one user.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include "emulator.h"

static const uint8_t magic[8] = {'D', 'O', 'C', 'A', 'E', 'M', 'U', '1'};

static uint32_t descriptor_crc(const struct export_descriptor *descriptor) {
    return codec_crc32(descriptor, offsetof(struct export_descriptor, crc32));
}

bool export_fill(struct doca_mmap *mmap) {
    uint64_t token = 0;
    if (getrandom(&token, sizeof token, 0) != (ssize_t)sizeof token) {
        return false;
    }
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* fails where Yama is not, where it is not needed */
    mmap->token = token | 1;
    mmap->descriptor = (struct export_descriptor){
        .access = mmap->access,
        .process = (uint64_t)getpid(),
        .address = (uintptr_t)mmap->address,
        .size = mmap->size,
        .location = (uintptr_t)mmap->location,
        .token_address = (uintptr_t)&mmap->token,
        .token = mmap->token,
    };
    memcpy(mmap->descriptor.magic, magic, sizeof magic);
    mmap->descriptor.crc32 = descriptor_crc(&mmap->descriptor);
    return true;
}

bool export_parse(const void *bytes, size_t size, struct export_descriptor *descriptor) {
    const uint32_t pci = DOCA_ACCESS_FLAG_PCI_READ_ONLY | DOCA_ACCESS_FLAG_PCI_READ_WRITE;
    const uint32_t known = 2u * DOCA_ACCESS_FLAG_PCI_RELAXED_ORDERING - 1;
    if (size != sizeof *descriptor) {
        return false;
    }
    memcpy(descriptor, bytes, sizeof *descriptor);
    return memcmp(descriptor->magic, magic, sizeof magic) == 0 && descriptor->crc32 == descriptor_crc(descriptor) &&
           descriptor->reserved == 0 && descriptor->reserved_end == 0 && (descriptor->access & ~known) == 0 &&
           (descriptor->access & pci) != 0 && (descriptor->access & pci) != pci && descriptor->process > 0 &&
           descriptor->process <= INT32_MAX && descriptor->address != 0 && descriptor->location != 0 &&
           descriptor->size > 0 && descriptor->address + descriptor->size > descriptor->address &&
           descriptor->location + descriptor->size > descriptor->location && descriptor->token != 0;
}

/* As process_copy_step(), by the process' file of its memory. */
static ssize_t process_copy_by_file(const struct export_descriptor *descriptor, uint64_t address, void *here,
                                    size_t size, bool write) {
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%d/mem", (int)descriptor->process);
    int file = open(path, (write ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (file < 0) {
        return -1;
    }
    ssize_t copied = write ? pwrite(file, here, size, (off_t)address) : pread(file, here, size, (off_t)address);
    close(file);
    return copied;
}

/* qemu-user 7.2 has none of the two calls (ENOSYS); the addresses of a 64-bit guest are the host's. */
static ssize_t process_copy_step(const struct export_descriptor *descriptor, uint64_t address, void *here, size_t size,
                                 bool write) {
    struct iovec local = {.iov_base = here, .iov_len = size};
    struct iovec remote = {.iov_base = (void *)(uintptr_t)address, .iov_len = size};
    ssize_t copied = write ? process_vm_writev((pid_t)descriptor->process, &local, 1, &remote, 1, 0)
                           : process_vm_readv((pid_t)descriptor->process, &local, 1, &remote, 1, 0);
    return copied < 0 && errno == ENOSYS ? process_copy_by_file(descriptor, address, here, size, write) : copied;
}

/* Copies between here and 'address' in the process; the kernel may do it in several steps. */
static bool process_copy(const struct export_descriptor *descriptor, uint64_t address, void *here, size_t size,
                         bool write) {
    while (size > 0) {
        ssize_t copied = process_copy_step(descriptor, address, here, size, write);
        if (copied <= 0) {
            return false;
        }
        here = (uint8_t *)here + copied;
        address += (size_t)copied;
        size -= (size_t)copied;
    }
    return true;
}

static bool export_lives(const struct export_descriptor *descriptor) {
    uint64_t token = 0;
    return process_copy(descriptor, descriptor->token_address, &token, sizeof token, false) &&
           token == descriptor->token;
}

bool export_read(const struct export_descriptor *descriptor, const uint8_t *address, void *target, size_t size) {
    uint64_t offset = (uintptr_t)address - descriptor->address;
    return export_lives(descriptor) && process_copy(descriptor, descriptor->location + offset, target, size, false);
}

bool export_write(const struct export_descriptor *descriptor, uint8_t *address, const void *source, size_t size) {
    uint64_t offset = (uintptr_t)address - descriptor->address;
    return export_lives(descriptor) &&
           process_copy(descriptor, descriptor->location + offset, (void *)(uintptr_t)source, size, true);
}
