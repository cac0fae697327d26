// Package httpserver makes the HTTP servers of this project. Each server bounds its headers, its connections, the time of a request that
// arrives, and, where clients are not trusted, the memory that requests hold.
package httpserver
