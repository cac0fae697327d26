// SPDX-License-Identifier: Apache-2.0

// Package ownership contains what all objects of the operator share: labels, owner references, and names from hashes.
package ownership
