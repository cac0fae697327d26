// Package schedule is what a plan says about the work inside MoE layers: for attention and experts on ranks of their own FinDEP's schedule by
// the length of samples (package pipeline), and for experts on the ranks of attention the groups that EPS-MoE works them off in, by the
// tokens of a rank (package eps).
//
// All times are modelled, by one hardware profile. No engine is driven by it: it is for people, and for plug-ins that read plans.
//
// Invariants:
//   - A schedule is a function of the model's shape, the ranks, the local activation rate and the profile: no clock, no chance.
//   - What Of returns passes Check.
//   - Of takes at most a few milliseconds for each length.
package schedule
