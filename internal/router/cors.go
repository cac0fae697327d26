// SPDX-License-Identifier: Apache-2.0

package router

import (
	"net/http"
	"sync"
)

// maxCORSOrigins bounds the number of origins that are remembered.
const maxCORSOrigins = 64

// corsHeaders are the headers that let a browser show a response to a page of another origin.
var corsHeaders = []string{"Access-Control-Allow-Origin", "Access-Control-Allow-Credentials", "Access-Control-Expose-Headers"}

// cors gives the router's own errors the CORS headers of the engine: without them a browser hides status and message
// from the page. The engine decides which origins are allowed. It answers a page's preflight request first, so its
// headers are known when an error can occur.
type cors struct {
	mu sync.Mutex
	// any is the header for each origin, if the engine allows all origins. origins contains those of single origins.
	any     http.Header
	origins map[string]http.Header
}

// learn remembers the headers of an engine's response to a request of a page.
func (c *cors) learn(request, response http.Header) {
	origin, allowed := request.Get("Origin"), response.Get(corsHeaders[0])
	if origin == "" || allowed != "*" && allowed != origin {
		return
	}
	header := http.Header{}
	for _, name := range corsHeaders {
		if value := response.Get(name); value != "" {
			header.Set(name, value)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if allowed == "*" {
		c.any = header
		return
	}
	if c.origins == nil || len(c.origins) == maxCORSOrigins {
		c.origins = map[string]http.Header{}
	}
	c.origins[origin] = header
}

// apply adds the headers to an error of the router.
func (c *cors) apply(request, response http.Header) {
	origin := request.Get("Origin")
	if origin == "" {
		return
	}
	response.Add("Vary", "Origin")
	c.mu.Lock()
	defer c.mu.Unlock()
	header := c.origins[origin]
	if header == nil {
		header = c.any
	}
	for name, values := range header {
		response[name] = values
	}
}
