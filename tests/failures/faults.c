// SPDX-License-Identifier: Apache-2.0
/*
 * faults.c - faults of clocks and disks for the failure matrix, as a preloaded library
 *
 * FAULTS_CONTROL names a file of struct faults, which the test changes during the run.
 * FAULTS_PATH says of which files operations fail: those whose path begins so.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct faults {
    _Atomic int64_t clock_offset_ns;
    _Atomic int32_t read_error;
    _Atomic int32_t write_error;
    _Atomic int32_t flush_error;
    _Atomic uint32_t one_in; /* operations that would fail; 0 and 1: all */
    _Atomic uint64_t met;    /* operations that have failed */
    _Atomic uint32_t hold;   /* reads wait for as long as this is set */
    _Atomic uint32_t held;   /* reads that wait now */
};

static struct faults none;
static struct faults *faults = &none;
static char prefix[PATH_MAX];
static size_t prefix_length;
static atomic_uint counter;

__attribute__((constructor)) static void map_faults(void) {
    const char *path = getenv("FAULTS_CONTROL");
    const char *where = getenv("FAULTS_PATH");
    if (path == NULL)
        return;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof(struct faults), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED)
        faults = mapped;
    if (where != NULL && strlen(where) < sizeof prefix) {
        strcpy(prefix, where);
        prefix_length = strlen(where);
    }
}

/* Returns whether fd is one of those files. */
static int chosen(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = prefix_length == 0 ? -1 : readlink(link, path, sizeof path - 1);
    return length >= (ssize_t)prefix_length && memcmp(path, prefix, prefix_length) == 0;
}

/* Returns the errno that an operation on fd ends with, or 0. */
static int fails(int fd, _Atomic int32_t *which) {
    int error = atomic_load(which);
    if (error == 0 || !chosen(fd))
        return 0;
    uint32_t one_in = atomic_load(&faults->one_in);
    if (one_in > 1 && (atomic_fetch_add(&counter, 1) * 2654435761u >> 8) % one_in != 0)
        return 0;
    atomic_fetch_add(&faults->met, 1);
    return error;
}

/* Waits while reads are held: a device that does not answer. */
static void wait_while_held(int fd) {
    if (atomic_load(&faults->hold) == 0 || !chosen(fd))
        return;
    atomic_fetch_add(&faults->held, 1);
    while (atomic_load(&faults->hold) != 0)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    atomic_fetch_sub(&faults->held, 1);
}

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

#define FAULTY(which, fd)                                                                                              \
    do {                                                                                                               \
        int error = fails(fd, &faults->which##_error);                                                                 \
        if (error != 0) {                                                                                              \
            errno = error;                                                                                             \
            return -1;                                                                                                 \
        }                                                                                                              \
    } while (0)

ssize_t pread(int fd, void *data, size_t size, off_t offset) {
    wait_while_held(fd);
    FAULTY(read, fd);
    return REAL(pread)(fd, data, size, offset);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
    wait_while_held(fd);
    FAULTY(read, fd);
    return REAL(pread64)(fd, data, size, offset);
}

ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) {
    wait_while_held(fd);
    FAULTY(read, fd);
    return REAL(preadv)(fd, parts, count, offset);
}

ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) {
    wait_while_held(fd);
    FAULTY(read, fd);
    return REAL(preadv64)(fd, parts, count, offset);
}

ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    wait_while_held(fd);
    FAULTY(read, fd);
    return REAL(preadv2)(fd, parts, count, offset, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    wait_while_held(fd);
    FAULTY(read, fd);
    return REAL(preadv64v2)(fd, parts, count, offset, flags);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    FAULTY(write, fd);
    return REAL(pwrite)(fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    FAULTY(write, fd);
    return REAL(pwrite64)(fd, data, size, offset);
}

ssize_t write(int fd, const void *data, size_t size) {
    FAULTY(write, fd);
    return REAL(write)(fd, data, size);
}

int fsync(int fd) {
    FAULTY(flush, fd);
    return REAL(fsync)(fd);
}

int fdatasync(int fd) {
    FAULTY(flush, fd);
    return REAL(fdatasync)(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (syscall(SYS_clock_gettime, clock, now) != 0)
        return -1;
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
        int64_t offset = atomic_load(&faults->clock_offset_ns);
        int64_t total = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + offset;
        now->tv_sec = total / 1000000000;
        now->tv_nsec = total % 1000000000;
    }
    return 0;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now != NULL)
        *now = found.tv_sec;
    return found.tv_sec;
}
