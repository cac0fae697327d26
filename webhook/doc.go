// Package webhook answers the API server's admission reviews of the operator's kinds: it refuses what no schema can tell to be
// wrong, and warns of what is risky.
//
// Invariants:
//   - Nothing is changed: every default is in the schema, so that what a GitOps tool applies is what it reads back.
//   - Nothing depends on it. The controllers check the same again and say so in conditions: the configuration's failure policy
//     is Ignore, since a manager that is away must not keep anybody from mending a MoEDeployment.
//   - An object that exists is never stuck: changes of metadata, deletions, and faults that an update does not add are let through.
//   - What another object tells is only held against a spec where that cannot change any more; else it is a warning, since the
//     objects of one commit are applied in any order.
package webhook
