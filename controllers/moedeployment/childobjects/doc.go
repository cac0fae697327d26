// SPDX-License-Identifier: Apache-2.0

// Package childobjects reads and writes child objects of a MoEDeployment for the other packages of its controller:
// server-side apply with ownership checks, changes of workloads, and facts that workloads record for their pods.
package childobjects
