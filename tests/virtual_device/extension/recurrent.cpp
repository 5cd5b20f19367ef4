// Recurrent cells, which torch has fused on every device but the CPU, with a workspace that they save for backward.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace virtual_device {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

bool is_there(const Maybe& tensor) {
  return tensor.has_value() && tensor->defined();
}

Tensor with_bias(const Tensor& gates, const Maybe& bias) {
  return is_there(bias) ? gates + *bias : gates;
}

Tensor of_bias(const Tensor& gradient, bool has_bias) {
  return has_bias ? gradient.sum(0) : Tensor();
}

// The derivatives, by what the functions gave.
Tensor through_sigmoid(const Tensor& gradient, const Tensor& value) {
  return gradient * (1 - value) * value;
}

Tensor through_tanh(const Tensor& gradient, const Tensor& value) {
  return gradient * (1 - value * value);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const Maybe& input_bias,
    const Maybe& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  const Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& workspace,
    bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const Tensor grad_out = is_there(grad_hy) ? *grad_hy : at::zeros_like(cx), squashed = cy.tanh();
  Tensor grad_cell = through_tanh(grad_out * out, squashed);
  if (is_there(grad_cy)) {
    grad_cell = grad_cell + *grad_cy;
  }
  const Tensor grad_gates = at::cat(
      {through_sigmoid(grad_cell * cell, in),
       through_sigmoid(grad_cell * cx, forget),
       through_tanh(grad_cell * in, cell),
       through_sigmoid(grad_out * squashed, out)},
      1);
  return {grad_gates, grad_cell * forget, of_bias(grad_gates, has_bias)};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const Maybe& input_bias,
    const Maybe& hidden_bias) {
  const auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = (of_input[0] + of_hidden[0]).sigmoid(), update = (of_input[1] + of_hidden[1]).sigmoid();
  const Tensor fresh = (of_input[2] + reset * of_hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, of_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const Tensor &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3], &of_hidden = saved[4];
  const Tensor grad_fresh = through_tanh(grad_hy * (1 - update), fresh);
  const Tensor grad_update = through_sigmoid(grad_hy * (hx - fresh), update);
  const Tensor grad_reset = through_sigmoid(grad_fresh * of_hidden, reset);
  const Tensor input_gates = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const Tensor hidden_gates = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {
      input_gates, hidden_gates, grad_hy * update, of_bias(input_gates, has_bias), of_bias(hidden_gates, has_bias)};
}

} // namespace
} // namespace virtual_device

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &virtual_device::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &virtual_device::lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &virtual_device::gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &virtual_device::gru_cell_backward);
}
