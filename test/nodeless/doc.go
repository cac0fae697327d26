// Package nodeless is a real control plane without nodes, for tests of what controllers do with many objects: etcd,
// kube-apiserver and kube-controller-manager of the pinned release, unchanged, the artifact store, and an agent that writes
// the status of every pod of ours as if it ran somewhere. It needs no root and no namespaces.
//
// What the agent plays is as exact as the operator can see: inspections report a checkpoint whose digest follows from where it
// lies, profiling Jobs publish a real profile, engines give the answers that a plan is proven against, and request routers
// report stationary traffic. Nothing is computed by a model. All pods are bound to one node that does not exist elsewhere.
package nodeless
