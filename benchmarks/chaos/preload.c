/* Preloaded into the processes of a run (LD_PRELOAD) to simulate a wall clock that jumps and a slow
   disk, controlled by a shared file (benchmarks/chaos/means.py).

   CLOCK_REALTIME gets an offset. Waits until a time of that clock end when that time has come, as
   they do when the kernel's clock is set: a wait that has been jumped over ends at once.
   CLOCK_MONOTONIC and file times are unchanged. Writes, syncs and renames below the folder are
   delayed. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    volatile int64_t ahead_ns; /* offset of the wall clock */
    volatile int64_t write_us; /* delay of a write */
    volatile int64_t sync_us;  /* delay of fsync, fdatasync and rename */
};

static struct control none;
static struct control *control = &none;
static const char *folder = "";
static const int64_t SECOND = 1000000000, SLICE = 200000000;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("KEEL_CHAOS_CONTROL");
    const char *below = getenv("KEEL_CHAOS_FOLDER");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (below)
        folder = strdup(below);
    if (file < 0)
        return;
    void *found = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED)
        control = found;
    close(file);
}

static int64_t ns_of(const struct timespec *t) { return t->tv_sec * SECOND + t->tv_nsec; }

static struct timespec of_ns(int64_t ns) {
    struct timespec t = {ns / SECOND, ns % SECOND};
    return t;
}

static int64_t real_now(void) {
    struct timespec t;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &t);
    return ns_of(&t);
}

/* ---- the wall clock ---- */

int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime"); /* the vDSO: no system call */
    int failed = real(clock, t);
    int64_t ahead = control->ahead_ns;
    if (!failed && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *t = of_ns(ns_of(t) + ahead);
    return failed;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    if (!failed) {
        t->tv_sec = now.tv_sec;
        t->tv_usec = now.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t)
        *t = now.tv_sec;
    return now.tv_sec;
}

/* The kernel's time at which to check again whether `until` has come. */
static struct timespec slice(const struct timespec *until) {
    int64_t most = real_now() + SLICE, end = ns_of(until) - control->ahead_ns;
    return of_ns(end < most ? (end < 0 ? 0 : end) : most);
}

static int passed(const struct timespec *until) {
    return real_now() + control->ahead_ns >= ns_of(until);
}

/* The end of a slice is reported as a spurious wake-up, after which callers wait again. */
static int woken(int status, const struct timespec *until) {
    return status == ETIMEDOUT && !passed(until) ? 0 : status;
}

#define CLOCK_OF_COND_IS_MONOTONIC 2 /* glibc's bit of __wrefs */

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict lock,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real)
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (cond->__data.__wrefs & CLOCK_OF_COND_IS_MONOTONIC)
        return real(cond, lock, until);
    struct timespec end = slice(until);
    return woken(real(cond, lock, &end), until);
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict lock,
                           clockid_t clock, const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    if (clock != CLOCK_REALTIME)
        return real(cond, lock, clock, until);
    struct timespec end = slice(until);
    return woken(real(cond, lock, clock, &end), until);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "sem_timedwait");
    for (;;) {
        struct timespec end = slice(until);
        int failed = real(semaphore, &end);
        if (!failed || errno != ETIMEDOUT || passed(until))
            return failed;
    }
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict lock, const struct timespec *restrict until) {
    static int (*real)(pthread_mutex_t *, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    for (;;) {
        struct timespec end = slice(until);
        int status = real(lock, &end);
        if (status != ETIMEDOUT || passed(until))
            return status;
    }
}

/* Abseil, a part of Ray, waits on futexes directly. */
long syscall(long number, ...) {
    static long (*real)(long, ...);
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(rest, long);
    va_end(rest);
    if (!real)
        real = dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
        const struct timespec *until = (const struct timespec *)a[3];
        struct timespec end = slice(until);
        long done = real(number, a[0], a[1], a[2], &end, a[4], a[5]);
        if (done < 0 && errno == ETIMEDOUT && !passed(until))
            errno = EINTR; /* as after a signal: the caller waits again */
        return done;
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* ---- the disk ---- */

static void rest(int64_t us) {
    struct timespec t = of_ns(us * 1000);
    int before = errno;
    nanosleep(&t, NULL);
    errno = before;
}

static int ours(int file) {
    char link[32], path[PATH_MAX];
    int n = 0, digits = 0, number = file;
    char reversed[12];
    if (!*folder || file < 0)
        return 0;
    memcpy(link, "/proc/self/fd/", 14);
    do
        reversed[digits++] = '0' + number % 10;
    while (number /= 10);
    for (n = 14; digits;)
        link[n++] = reversed[--digits];
    link[n] = 0;
    int before = errno;
    ssize_t size = readlink(link, path, sizeof path - 1);
    errno = before;
    return size > 0 && (path[size] = 0, !strncmp(path, folder, strlen(folder)));
}

#define SLOW(us, file)                 \
    if (control->us && ours(file))     \
        rest(control->us);
#define REAL(type, name, ...)              \
    static type (*real)(__VA_ARGS__);      \
    if (!real)                             \
        real = dlsym(RTLD_NEXT, #name);

ssize_t write(int file, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t)
    SLOW(write_us, file)
    return real(file, data, size);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    REAL(ssize_t, pwrite, int, const void *, size_t, off_t)
    SLOW(write_us, file)
    return real(file, data, size, at);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)
    SLOW(write_us, file)
    return real(file, data, size, at);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int)
    SLOW(write_us, file)
    return real(file, parts, count);
}

int fsync(int file) {
    REAL(int, fsync, int)
    SLOW(sync_us, file)
    return real(file);
}

int fdatasync(int file) {
    REAL(int, fdatasync, int)
    SLOW(sync_us, file)
    return real(file);
}

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *)
    if (control->sync_us && *folder && !strncmp(from, folder, strlen(folder)))
        rest(control->sync_us);
    return real(from, to);
}
