// Package enginecounts reads what engines count themselves, from the /metrics of their pods: local and remote activations, and steps with the
// tokens that they compute.
//
// The metrics of steps are those of engine.StepMetrics. They become one distribution of tokens per step for each pod, whose older half-lives weigh
// less. The metric of activations is semmoe_engine_activations_total with the labels rank and locality ("local" or "remote"); further labels, such as layer,
// are summed. The reference engine has it, and vLLM with the plug-in of integrations/vllm. docs/vllm-plugin.md is its contract.
//
// Invariants:
//   - Reading is bounded: in time, in bytes of an answer, and in answers at a time.
//   - A pod without the metric, or one that does not answer, has no counts. Nothing else follows from that.
package enginecounts
