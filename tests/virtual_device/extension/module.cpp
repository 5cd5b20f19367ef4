// What Python asks of the virtual device beyond torch's own calls.
#include "device.h"

#include <ATen/ops/from_blob.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace vd = virtual_device;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("DEVICES") = vd::kDevices;
  m.attr("RING") = vd::kRing;
  m.def("set_link", [](bool out, double latency, double bandwidth) {
    vd::set_link(out ? vd::Direction::kOut : vd::Direction::kIn, latency, bandwidth);
  });
  m.def("set_delay", &vd::set_delay);
  m.def("clear_delays", &vd::clear_delays);
  m.def("set_capacity", &vd::set_capacity);
  m.def("copied_bytes", &vd::copied_bytes);
  m.def("set_replays", &vd::set_replays);
  m.def("graphs_alive", &vd::graphs_alive);
  m.def("waits", &vd::waits_so_far);
  m.def("set_clock", &vd::set_clock);
  m.def("start_noting", &vd::start_noting);
  m.def("noted", &vd::noted);
  m.def("register_host", &vd::register_host);
  m.def("unregister_host", &vd::unregister_host);
  m.def("sleep", [](int device, double seconds) {
    vd::current_worker(device).enqueue({vd::Kind::kKernel, "sleep", [seconds](std::uint64_t) { vd::pause(seconds); }});
  });
  pybind11::class_<vd::Point, vd::PointPtr>(m, "Gate")
      .def("open", &vd::Point::finish)
      .def("is_open", &vd::Point::is_over);
  m.def("hold_link", [](bool out) { // gates: the first opens when a copy has come to the second
    const auto barrier = vd::hold_link(out ? vd::Direction::kOut : vd::Direction::kIn);
    return std::make_pair(barrier.reached, barrier.opened);
  });
  m.def("hold", [](int device) { // the current stream stands still until the gate is opened
    auto gate = std::make_shared<vd::Point>();
    vd::current_worker(device).wait_for(gate);
    return gate;
  });
  m.def("peek", [](const at::Tensor& tensor) { // whatever is there now, in no order with any stream
    TORCH_CHECK(vd::is_device_memory(tensor.data_ptr()), "peek wants a tensor on the virtual device");
    const auto options = tensor.options().device(c10::kCPU);
    return at::from_blob(vd::for_workers(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options).clone();
  });
}
