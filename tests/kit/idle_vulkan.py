"""A Vulkan device that computes nothing, for what asks which nodes run where, in which order and at which addresses:
a layer over the driver, by which no pipeline is compiled (on lavapipe that takes seconds each) and none is run. Memory,
copies, queues, barriers and what the device says that it can do are the driver's.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

_NAME = "VK_LAYER_ggml_npu_idle"
_SOURCE = """
#include <string.h>
#include <vulkan/vk_layer.h>

static PFN_vkGetInstanceProcAddr of_instance;
static PFN_vkGetDeviceProcAddr of_device;

static VkResult create_instance(const VkInstanceCreateInfo * info, const VkAllocationCallbacks * a, VkInstance * made) {
    VkLayerInstanceCreateInfo * link = (VkLayerInstanceCreateInfo *) info->pNext;
    while (link->sType != VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO || link->function != VK_LAYER_LINK_INFO) {
        link = (VkLayerInstanceCreateInfo *) link->pNext;
    }
    of_instance = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    return ((PFN_vkCreateInstance) of_instance(NULL, "vkCreateInstance"))(info, a, made);
}

static VkResult create_device(VkPhysicalDevice physical, const VkDeviceCreateInfo * info,
                              const VkAllocationCallbacks * a, VkDevice * made) {
    VkLayerDeviceCreateInfo * link = (VkLayerDeviceCreateInfo *) info->pNext;
    while (link->sType != VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO || link->function != VK_LAYER_LINK_INFO) {
        link = (VkLayerDeviceCreateInfo *) link->pNext;
    }
    PFN_vkGetInstanceProcAddr next = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    of_device = link->u.pLayerInfo->pfnNextGetDeviceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    return ((PFN_vkCreateDevice) next(NULL, "vkCreateDevice"))(physical, info, a, made);
}

static VkResult create_pipelines(VkDevice device, VkPipelineCache cache, uint32_t n,
                                 const VkComputePipelineCreateInfo * info, const VkAllocationCallbacks * a,
                                 VkPipeline * made) {
    for (uint32_t i = 0; i < n; i++) { made[i] = (VkPipeline) 1; }
    return VK_SUCCESS;
}

static void destroy_pipeline(VkDevice device, VkPipeline pipeline, const VkAllocationCallbacks * a) { }
static void bind_pipeline(VkCommandBuffer commands, VkPipelineBindPoint point, VkPipeline pipeline) { }
static void dispatch(VkCommandBuffer commands, uint32_t x, uint32_t y, uint32_t z) { }

static PFN_vkVoidFunction ours(const char * name) {
    static const struct { const char * name; void * function; } all[] = {
        { "vkCreateInstance", create_instance }, { "vkCreateDevice", create_device },
        { "vkCreateComputePipelines", create_pipelines }, { "vkDestroyPipeline", destroy_pipeline },
        { "vkCmdBindPipeline", bind_pipeline }, { "vkCmdDispatch", dispatch },
    };
    for (unsigned i = 0; i < sizeof(all) / sizeof(*all); i++) {
        if (strcmp(name, all[i].name) == 0) { return (PFN_vkVoidFunction) all[i].function; }
    }
    return NULL;
}

static PFN_vkVoidFunction get_device(VkDevice device, const char * name) {
    if (strcmp(name, "vkGetDeviceProcAddr") == 0) { return (PFN_vkVoidFunction) get_device; }
    PFN_vkVoidFunction found = ours(name);
    return found ? found : of_device(device, name);
}

static PFN_vkVoidFunction get_instance(VkInstance instance, const char * name) {
    if (strcmp(name, "vkGetInstanceProcAddr") == 0) { return (PFN_vkVoidFunction) get_instance; }
    if (strcmp(name, "vkGetDeviceProcAddr") == 0) { return (PFN_vkVoidFunction) get_device; }
    PFN_vkVoidFunction found = ours(name);
    return found ? found : of_instance(instance, name);
}

VkResult vkNegotiateLoaderLayerInterfaceVersion(VkNegotiateLayerInterface * loader) {
    loader->pfnGetInstanceProcAddr = get_instance;
    loader->pfnGetDeviceProcAddr = get_device;
    loader->pfnGetPhysicalDeviceProcAddr = NULL;
    return VK_SUCCESS;
}
"""


def layer(folder: Path, include: Path) -> dict[str, str]:
    """The layer, built in a folder: what the environment must be of a process in which Vulkan computes nothing.

    include  folder of Vulkan's headers
    """
    library = folder / "libidle.so"
    command: list[str | Path] = ["cc", "-std=c11", "-O1", "-fPIC", "-shared", "-I", include, "-x", "c", "-"]
    subprocess.run([*command, "-o", library], input=_SOURCE, text=True, check=True)
    says = {"name": _NAME, "type": "GLOBAL", "library_path": str(library), "api_version": "1.3.0"}
    says |= {"implementation_version": "1", "description": "computes nothing"}
    (folder / "idle.json").write_text(json.dumps({"file_format_version": "1.1.2", "layer": says}))
    return {"VK_LAYER_PATH": str(folder), "VK_INSTANCE_LAYERS": _NAME}
