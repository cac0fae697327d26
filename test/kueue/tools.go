// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package kueue pins the release of Kueue whose manager the stories run. It is a separate module, so that none of its
// dependencies reaches the operator's go.mod.
package kueue

import _ "sigs.k8s.io/kueue/cmd/kueue"
