// SPDX-License-Identifier: Apache-2.0

// Package enginecounts reads the counters of engines from the /metrics endpoints of their pods: local and remote
// activations, and steps with the tokens that they compute.
//
// The step metrics are described by engine.StepMetrics. They are converted to one distribution of tokens per step for
// each pod, in which older steps weigh less (half-life). The activation metric is semmoe_engine_activations_total with
// the labels rank and locality ("local" or "remote"); further labels, such as layer, are summed. The reference engine
// and vLLM with the plug-in of integrations/vllm export it. docs/vllm-plugin.md is its contract. Engines that shuffle
// tokens also name the tables that they use: docs/token-shuffle.md.
//
// Invariants:
//   - Reading is bounded in time, in bytes of a response, and in concurrent requests.
//   - A pod without the metric, or a pod that does not respond, has no counts. There is no other consequence.
//   - Counts that cannot be true are not used, and the reason is reported.
package enginecounts
