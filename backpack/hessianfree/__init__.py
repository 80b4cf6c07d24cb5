"""Matrix-free products with Jacobians, Hessians and generalized Gauss-Newton matrices."""
