// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package argocd pins the release of Argo CD whose definitions the samples for it are held to. It is a separate module, so that none
// of it reaches the operator's go.mod.
package argocd

import _ "github.com/argoproj/argo-cd/v3/pkg/apis/application"
