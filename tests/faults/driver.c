/* A Vulkan driver in front of another, named by FAULTY_DRIVER: it passes everything on, and fails
   what it is told to, until a device is made anew. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*function)(void);
typedef function (*lookup)(void *, const char *);

/* The VkResult that each function is to give in place of what it does, 0 for none; and how often, at
   most. Set by tests. */
int faults[8], left[8];

static void *driver(void) {
  static void *library;
  if (!library) library = dlopen(getenv("FAULTY_DRIVER"), RTLD_NOW);
  return library;
}

#define FAULTY(index, name, parameters, arguments)      \
  static int32_t(*real_##name) parameters;              \
  static int32_t name parameters {                      \
    if (faults[index] && left[index]-- > 0) return faults[index]; \
    return real_##name arguments;                       \
  }

FAULTY(0, vkQueueSubmit, (void *q, uint32_t n, const void *s, uint64_t f), (q, n, s, f))
FAULTY(1, vkWaitSemaphores, (void *d, const void *i, uint64_t t), (d, i, t))
FAULTY(2, vkGetSemaphoreCounterValue, (void *d, uint64_t s, uint64_t *v), (d, s, v))
FAULTY(3, vkCreateBuffer, (void *d, const void *i, const void *a, void *b), (d, i, a, b))
FAULTY(4, vkCreateComputePipelines,
       (void *d, uint64_t c, uint32_t n, const void *i, const void *a, void *p),
       (d, c, n, i, a, p))

static int32_t (*real_vkCreateDevice)(void *, const void *, const void *, void *);

static int32_t vkCreateDevice(void *p, const void *i, const void *a, void *d) {
  if (faults[5] && left[5]-- > 0) return faults[5];
  memset(faults, 0, sizeof faults);
  return real_vkCreateDevice(p, i, a, d);
}

static function in_front(const char *name, function real) {
#define IF(known)                                                            \
  if (real && (!strcmp(name, #known) || !strcmp(name, #known "KHR"))) {      \
    real_##known = (void *)real;                                             \
    return (function)known;                                                  \
  }
  IF(vkQueueSubmit)
  IF(vkWaitSemaphores)
  IF(vkGetSemaphoreCounterValue)
  IF(vkCreateBuffer)
  IF(vkCreateComputePipelines)
  IF(vkCreateDevice)
  return real;
}

static lookup real_device_lookup;

static function device_lookup(void *device, const char *name) {
  return in_front(name, real_device_lookup(device, name));
}

/* The loader's interface to drivers: three functions. */

int32_t vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
  int32_t (*real)(uint32_t *) = dlsym(driver(), "vk_icdNegotiateLoaderICDInterfaceVersion");
  return real(version);
}

function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
  lookup look = (lookup)dlsym(driver(), "vk_icdGetInstanceProcAddr");
  function real = look(instance, name);
  if (real && !strcmp(name, "vkGetDeviceProcAddr")) {
    real_device_lookup = (lookup)real;
    return (function)device_lookup;
  }
  return in_front(name, real);
}

function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
  lookup look = (lookup)dlsym(driver(), "vk_icdGetPhysicalDeviceProcAddr");
  return look(instance, name);
}
