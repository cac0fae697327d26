// SPDX-License-Identifier: Apache-2.0

// Package client handles the client connections of the request router. It checks routes, reads request bodies within
// limits of size and time, and aborts responses that the client does not read.
package client
