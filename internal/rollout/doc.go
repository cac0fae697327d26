// Package rollout decides how replicas move from one revision to another. A change that the user makes is rolled within a
// budget of what may be out of service and what may be additional. A plan has to prove itself first: a canary of a few replicas
// soaks beside the revision that is in service, the two are compared, and then the plan is rolled out or taken back.
//
// Everything here is computed from what is observed at the moment: nothing is remembered, so that a controller that crashes, or
// another one that takes its place, goes on where the first has stopped.
package rollout
