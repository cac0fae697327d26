// Package refengine is the reference engine: a real MoE inference engine on the CPU that speaks the part of SGLang's
// surface that the operator uses, so that profiling, plans, routing and drift run without a GPU.
//
// Invariants:
//   - Ranks are logical. A rank, an expert map or a batch decides what is counted as local, never what is computed, unless a
//     fault is asked for.
//   - The HTTP surface is up before the model is loaded and until the last request is done; /health tells which it is.
//   - Options are checked before any work; two that contradict each other are an error that names both.
package refengine
