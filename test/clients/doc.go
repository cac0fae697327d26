// SPDX-License-Identifier: Apache-2.0

// Package clients tests the request router with the client libraries of its users, and the endpoint picker with Envoy.
// install.sh installs them from the package indexes of Python and Node.
package clients
