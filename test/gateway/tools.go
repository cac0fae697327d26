// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package gateway pins the release of the Gateway API Inference Extension whose InferencePool the tests install. It is a separate
// module, so that none of it reaches the operator's go.mod.
package gateway

import _ "sigs.k8s.io/gateway-api-inference-extension/api/v1"
