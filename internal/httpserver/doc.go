// SPDX-License-Identifier: Apache-2.0

// Package httpserver creates the HTTP servers of this project. Each server limits the size of headers, the number of
// connections and the time to receive a request. Servers for untrusted clients also limit the memory of requests.
package httpserver
