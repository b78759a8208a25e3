/* Stands before the kernel's calls that write files below $UNDER: some fail, some write half, some end the process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static unsigned long state;
static int every, last_file = -1;
static off_t last_begin;
static size_t last_length;

void fault_begin(unsigned long seed, int one_in)
{
    state = seed * 2862933555777941757UL + 3037000493UL;
    every = one_in;
}

static unsigned draw(unsigned below)
{
    state = state * 6364136223846793005UL + 1442695040888963407UL;
    return (unsigned)(state >> 33) % below;
}

static int is_due(int file)
{
    char name[64], path[4096] = "";
    if (!every) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    if (readlink(name, path, sizeof path - 1) <= 0 || strncmp(path, getenv("UNDER"), strlen(getenv("UNDER")))) return 0;
    if (draw(every)) return 0;
    if (draw(3) == 0) kill(getpid(), SIGKILL);
    return 1;
}

static int fail(int with)
{
    errno = with;
    return -1;
}

ssize_t pwrite64(int file, const void *data, size_t length, off64_t at)
{
    ssize_t (*real)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
    if (is_due(file)) {
        if (draw(2)) return fail(draw(2) ? EIO : ENOSPC);
        length = length > 1 ? length / 2 : length;
    }
    last_file = file, last_begin = at, last_length = length;
    return real(file, data, length, at);
}

ssize_t pwrite(int file, const void *data, size_t length, off_t at)
{
    return pwrite64(file, data, length, at);
}

ssize_t write(int file, const void *data, size_t length)
{
    ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    if (is_due(file)) {
        if (draw(2)) return fail(draw(2) ? EIO : ENOSPC);
        length = length > 1 ? length / 2 : length;
    }
    return real(file, data, length);
}

/* As a kernel does after a failed sync: the pages are dropped, and the next sync succeeds. */
static int failed_sync(int file)
{
    if (file == last_file) {
        void *zeros = calloc(1, last_length + 1);
        ssize_t (*real)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
        if (real(file, zeros, last_length, last_begin) < 0) abort();
        free(zeros);
    }
    return fail(EIO);
}

static int sync_by(int file, const char *name)
{
    int (*real)(int) = dlsym(RTLD_NEXT, name);
    if (is_due(file)) return failed_sync(file);
    if (file == last_file) last_file = -1; /* what was synced is not dropped by a later failure */
    return real(file);
}

int fsync(int file)
{
    return sync_by(file, "fsync");
}

int fdatasync(int file)
{
    return sync_by(file, "fdatasync");
}
